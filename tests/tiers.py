"""Which command runs which test, and in which order: `make quick`, `make test`, `make thorough`."""

from collections import Counter
from collections.abc import Callable
from typing import Any

SLOW = (
    "tests/coordinator", "tests/edge_client", "tests/export", "tests/hostile", "tests/system",
    "tests/test_no_pickle.py",
    "tests/sdk/aggregate/test_byzantine.py", "tests/sdk/algorithms/test_ffgg.py",
    "tests/sdk/algorithms/test_trajectories.py",
    "tests/sdk/planning/test_latency_model.py",
    "tests/sdk/planning/test_width_schedule.py", "tests/sdk/planning/test_planner_bench.py",
    "tests/sdk/planning/test_device_cli.py",
    "tests/sdk/planning/test_planner.py", "tests/sdk/planning/test_foreign_models.py",
    "tests/sdk/model/test_any_network.py", "tests/sdk/model/test_zoo.py",
    "tests/sdk/simulation", "tests/sdk/data", "tests/sdk/training/test_frozen_features.py",
    "tests/bench/test_fuzz.py", "tests/sdk/test_personalizer.py",
    "tests/sdk/algorithms/test_hermes.py::test_devices_with_other_labels_keep_other_channels",
    "tests/sdk/federated/test_own_plan.py", "tests/sdk/programs/test_engine.py", "tests/sdk/programs/test_hostile.py",
    "tests/sdk/programs/test_parity.py::test_what_a_mask_takes_its_program_takes_too",
    "tests/sdk/programs/test_parity.py::test_each_layer_errs_no_more_than_twice_as_much_as_torch",
    "tests/sdk/programs/test_ordinary.py", "tests/sdk/programs/test_tutorials.py", "tests/sdk/programs/test_vjp.py",
    "tests/sdk/cli/test_missing_packages.py", "tests/sdk/cli/test_help.py",
    "tests/sdk/federated/test_kit.py::test_every_algorithm_learns_and_serves_from_a_kit",
    "tests/sdk/algorithms/test_classic_conditions.py", "tests/sdk/algorithms/test_classic_defects.py",
    "tests/sdk/algorithms/test_reductions.py", "tests/sdk/programs/test_exact.py",
    "tests/sdk/federated/test_blueprint.py::test_a_process_of_its_own_gives_the_same_bytes",
    "tests/sdk/training/test_sgd.py::test_training_imports_no_optimizer_of_torch",
    "tests/sdk/planning/test_layer_stats.py::test_shapes_are_those_of_the_compact_model[resnet18]",
    "tests/laws/test_algorithm_laws.py::test_the_personal_model_exports",
)  # fmt: skip
"""Files and tests that ``make quick`` leaves to ``make test``: they take seconds each, as what learns for many rounds
does, or are no part of the inner loop."""
QUICK_LAWS = {"fedavg", "hermes", "pfedgm"}
"""The algorithms whose laws ``make quick`` looks at: a plain one, one with masks, one with statistics."""

THOROUGH = (
    "tests/bench/test_bars.py",
    "tests/bench/test_export.py::test_figures",
    "tests/bench/test_fuzz.py::test_some_thousand_inputs",
    "tests/bench/test_people.py",
    "tests/bench/test_private.py",
    "tests/bench/test_simulation.py",
    "tests/coordinator/test_store.py::test_two_processes_race_for_one_fleet[sqlite]",
    "tests/edge_client/test_agent_plan.py::test_a_class_to_come",
    "tests/edge_client/test_deploy.py::test_only_better_models_are_deployed_and_a_rollback_holds",
    "tests/export/test_beyond_python.py::test_node_runs_every_variant_unchanged",
    "tests/export/test_matrix.py::test_personal_model_agrees_with_torch[fedavg-efficientnet_lite0-True-residual]",
    "tests/export/test_matrix.py::test_personal_model_agrees_with_torch[fedavg-mobilenet_v3_small-True-lowrank]",
    "tests/export/test_matrix.py::test_personal_model_agrees_with_torch[fedavg-resnet18-False-lowrank]",
    "tests/export/test_matrix.py::test_personal_model_agrees_with_torch[fedavg-resnet18-True-none]",
    "tests/export/test_matrix.py::test_personal_model_agrees_with_torch[thorki-imu_cnn-True-lowrank]",
    "tests/export/test_matrix.py::test_personal_model_agrees_with_torch[thorki-resnet18-False-none]",
    "tests/export/test_nchwc.py::test_a_network_with_gates_stays_blocked",
    "tests/export/test_ordinary_networks.py::test_a_bundle_is_whole",
    "tests/export/test_ordinary_networks.py::test_a_bundle_of_sequences_that_end",
    "tests/export/test_ordinary_networks.py::test_a_network_that_begins_with_zeros",
    "tests/export/test_predictor.py::test_eight_threads",
    "tests/export/test_spoken.py::test_a_network_answers_as_torch_does_at_any_batch[expand",
    "tests/export/test_spoken.py::test_a_network_answers_as_torch_does_at_any_batch[function",
    "tests/export/test_spoken.py::test_a_network_answers_as_torch_does_at_any_batch[larger",
    "tests/export/test_spoken.py::test_a_network_answers_as_torch_does_at_any_batch[plane, larger",
    "tests/export/test_tasks_in_bundles.py::test_a_bundle_says_what_its_task_has_to_say[per_step]",
    "tests/export/test_tasks_in_bundles.py::test_small_variants",
    "tests/export/test_tokens.py::test_a_device_without_torch_learns_them_from_a_kit",
    "tests/export/test_tokens.py::test_they_learn_and_are_exported[Sentences",
    "tests/hostile/test_siege_messages.py::test_32_ten_thousand_transfers",
    "tests/laws/test_algorithm_laws.py::test_the_personal_model_exports",
    "tests/privacy/test_audit.py::test_a_flaw_shows[a_ledger_that_forgets",
    "tests/privacy/test_audit.py::test_a_flaw_shows[half_the_noise",
    "tests/privacy/test_audit.py::test_no_more_shows_than_is_claimed_and_not_much_less",
    "tests/privacy/test_clipping.py::test_the_protocol_changes_no_byte[False-c",
    "tests/privacy/test_clipping.py::test_the_protocol_changes_no_byte[False-d",
    "tests/privacy/test_rule.py::test_a_simulation_with_secure_sums",
    "tests/privacy/test_secure_sum.py::test_what_opens_is_the_plain_sum",
    "tests/sdk/algorithms/test_fedrep.py::test_linear_body_finds_the_common_subspace",
    "tests/sdk/algorithms/test_hermes.py::test_a_newcomer_learns_for_epochs_of_its_own",
    "tests/sdk/algorithms/test_hermes.py::test_a_subnetwork_of_half_the_parameters_is_worth",
    "tests/sdk/algorithms/test_hermes.py::test_fine_tuning_that_costs_accuracy_is_not_served",
    "tests/sdk/algorithms/test_hermes.py::test_the_gate_opens_where_everybodys_average_fits_nobody",
    "tests/sdk/algorithms/test_perfedavg.py::test_it_learns_a_better_start_than_its_own_average",
    "tests/sdk/algorithms/test_thorki.py::test_one_graph_with_both_branches_and_the_gate_exports",
    "tests/sdk/cli/test_help.py::test_one_benchmark_imports_no_other",
    "tests/sdk/cli/test_missing_packages.py::test_what_lacks_a_package_names_its_extra[seglearn",
    "tests/sdk/data/test_glucose.py::test_forecasting_together_is_better",
    "tests/sdk/federated/test_blueprint.py::test_models_of_ones_own",
    "tests/sdk/federated/test_blueprint.py::test_what_the_run_is_to_blame_for",
    "tests/sdk/federated/test_kit.py::test_equal_runs_give_equal_files_in_any_process",
    "tests/sdk/federated/test_kit.py::test_every_algorithm_learns_and_serves_from_a_kit_what_it_does_where_torch_is[pfedgm-ModelSpec(name='imu",
    "tests/sdk/model/test_zoo.py::test_half_the_channels_gone_equals_the_masked_dense_twin[efficientnet_b0]",
    "tests/sdk/model/test_zoo.py::test_half_the_channels_gone_equals_the_masked_dense_twin[resnet18]",
    "tests/sdk/model/test_zoo.py::test_parts_and_channel_groups[efficientnet_b0]",
    "tests/sdk/model/test_zoo.py::test_parts_and_channel_groups[resnet18]",
    "tests/sdk/planning/test_foreign_models.py::test_a_graph_that_shows_no_weights_is_timed",
    "tests/sdk/planning/test_foreign_models.py::test_pruned_to_half_it_is_exported_and_computes_as_torch_does[mypkg.nets:G",
    "tests/sdk/planning/test_foreign_models.py::test_pruned_to_half_it_is_exported_and_computes_as_torch_does[mypkg.nets:R",
    "tests/sdk/planning/test_latency_model.py::test_every_convolution_of_a_planned_model_keeps_the_blocked_form[0.3-mob",
    "tests/sdk/planning/test_latency_model.py::test_every_convolution_of_a_planned_model_keeps_the_blocked_form[0.5-mob",
    "tests/sdk/planning/test_latency_model.py::test_every_convolution_of_a_planned_model_keeps_the_blocked_form[0.7-mob",
    "tests/sdk/planning/test_latency_model.py::test_every_convolution_of_a_planned_model_keeps_the_blocked_form[1.0-mob",
    "tests/sdk/planning/test_latency_model.py::test_every_convolution_of_a_planned_model_keeps_the_blocked_form[1e-06-mob",
    "tests/sdk/planning/test_planner.py::test_a_pretrained_model_gets_adapters_and_a_small_upload",
    "tests/sdk/planning/test_planner.py::test_every_zoo_model_can_be_planned",
    "tests/sdk/planning/test_planner_bench.py::test_at_least_the_named_share_of_channels_is_taken_away[8-eff",
    "tests/sdk/planning/test_planner_bench.py::test_at_least_the_named_share_of_channels_is_taken_away[8-res",
    "tests/sdk/programs/test_hostile.py::test_changed_bytes_are_refused_or_still_a_program[flip]",
    "tests/sdk/programs/test_hostile.py::test_changed_graphs_are_refused_or_still_run_within_bounds[sequence]",
    "tests/sdk/programs/test_ordinary.py::test_it_learns_alike_on_both_engines",
    "tests/sdk/programs/test_ordinary.py::test_what_a_mask_leaves_steps_and_answers_as_its_compact_twin",
    "tests/sdk/programs/test_parity.py::test_what_a_mask_takes_its_program_takes_too[swin",
    "tests/sdk/programs/test_shapes.py::test_the_table_foresees_every_value",
    "tests/sdk/programs/test_shapes.py::test_the_table_holds_no_operator",
    "tests/sdk/programs/test_vjp.py::test_each_layer_goes_forward_and_back_as_torch_does",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[apfl",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[ditto",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[fedavg_ft",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[fedbabu",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[fedper",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[fedprox",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[heart_pfl",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[lg_fedavg",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[perfedavg",
    "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not[thorki",
    "tests/sdk/simulation/test_experiment.py::test_a_killed_command",
    "tests/sdk/simulation/test_experiment.py::test_a_run_killed_at_any_write",
    "tests/sdk/simulation/test_workers.py::test_the_bytes_do_not_depend_on_the_number_of_workers[fedper]",
    "tests/sdk/simulation/test_workers.py::test_workers_learn_in_a_process_that_has_exported",
    "tests/sdk/simulation/test_workers.py::test_workers_that_can_take_no_gradients_say_why",
    "tests/sdk/test_personalizer.py::test_another_task_is_learned_pruned_and_checked_by_its_own_score[multilabel",
    "tests/sdk/test_plugins.py::test_nothing_in_the_current_folder_takes_the_place_of_what_is_installed",
    "tests/sdk/test_plugins.py::test_the_command_takes_a_package_of_ones_own",
    "tests/sdk/test_tasks.py::test_both_engines_learn_numbers_in_their_own_units[apfl",
    "tests/sdk/test_tasks.py::test_both_engines_learn_numbers_in_their_own_units[ditto",
    "tests/sdk/test_tasks.py::test_both_engines_learn_numbers_in_their_own_units[fedper",
    "tests/sdk/test_tasks.py::test_both_engines_learn_numbers_in_their_own_units[perfedavg",
    "tests/system/test_broker_abuse.py::test_a_broker_that_was_filled_to_its_limit",
    "tests/system/test_broker_abuse.py::test_a_flood_at_full_speed",
    "tests/system/test_broker_abuse.py::test_retained_messages_of_one_device_are_cleared_and_it_is_cut_off",
    "tests/system/test_chaos.py",
    "tests/system/test_demo.py",
    "tests/system/test_disasters.py::test_devices_follow_a_fleet_that_was_restored_from_a_backup_twice",
    "tests/system/test_every_algorithm.py::test_devices_deploy",
    "tests/system/test_examples.py::test_a_benchmark_finds_what_it_imports",
    "tests/system/test_from_init.py::test_what_init_made_is_served_as_it_is_and_shows_no_secret",
    "tests/system/test_gateway.py::test_a_gateway_is_killed_in_every_round",
    "tests/system/test_gateway.py::test_another_run_above",
    "tests/system/test_gateway.py::test_with_keys_on_both_links",
    "tests/system/test_history.py::test_a_flaw_that_is_planted_is_found_and_its_history_shortened[never_opens",
    "tests/system/test_history.py::test_a_flaw_that_is_planted_is_found_and_its_history_shortened[shuts_out",
    "tests/system/test_history.py::test_a_private_state_that_is_not_flushed",
    "tests/system/test_history.py::test_how_a_history_is_ended",
    "tests/system/test_in_process.py::test_a_link_that_loses_doubles_and_reorders_changes_no_byte[2",
    "tests/system/test_ingest.py::test_a_fleet_with_keys_on_postgresql",
    "tests/system/test_link_disasters.py",
    "tests/system/test_living.py::test_a_run_that_gates_refuse_is_called_off",
    "tests/system/test_load.py::test_a_body_survives_cuts",
    "tests/system/test_load.py::test_light_devices_add_up_what_nobody_sees",
    "tests/system/test_node_device.py::test_a_secure_round_goes_on_without_it",
    "tests/system/test_node_device.py::test_it_augments",
    "tests/system/test_node_device.py::test_it_learns_to_the_byte_what_a_python_device_learns[fedavg-int8-amqtt",
    "tests/system/test_node_device.py::test_its_own_tests[vectors",
    "tests/system/test_node_device.py::test_its_owner_takes_it_out",
    "tests/system/test_node_device.py::test_killed_and_cut",
    "tests/system/test_readme.py::test_a_program_runs[README.md-1]",
    "tests/system/test_readme.py::test_a_program_runs[README.md-5]",
    "tests/system/test_readme.py::test_the_programs_of_a_fleet_learn_together",
    "tests/system/test_seasons.py",
    "tests/system/test_secure_fleet.py::test_a_budget_is_kept_told_and_ends_the_fleet",
    "tests/system/test_secure_fleet.py::test_a_device_that_falls_silent_in_any_step",
    "tests/system/test_secure_fleet.py::test_a_length_that_follows",
    "tests/system/test_secure_fleet.py::test_a_round_",
    "tests/system/test_secure_fleet.py::test_an_owner_who_wants_more_company",
    "tests/system/test_secure_fleet.py::test_a_secure_fleet_learns_what_is_simulated_and_its_coordinator_keeps_no_update[p",
    "tests/system/test_secure_fleet.py::test_an_owner_who",
    "tests/system/test_secure_fleet.py::test_either_side_may_die_in_any_step",
    "tests/system/test_secure_fleet.py::test_metrics_are_told",
    "tests/system/test_secure_fleet.py::test_who_lies_in_a_secure_round_is_shut_out_and_the_others_go_on[1-another's",
    "tests/system/test_secure_fleet.py::test_who_lies_in_a_secure_round_is_shut_out_and_the_others_go_on[3-another r",
    "tests/system/test_secure_fleet.py::test_who_lies_in_a_secure_round_is_shut_out_and_the_others_go_on[4-no",
    "tests/system/test_secure_fleet.py::test_who_shares",
    "tests/system/test_several_inputs_in_a_fleet.py",
    "tests/system/test_story.py",
    "tests/system/test_stranger.py",
    "tests/system/test_tasks_over_mqtt.py",
    "tests/system/test_unlabelled_fleet.py::test_a_fleet_with_unlabelled_windows_learns_what_was_simulated[torch]",
    "tests/system/test_wheel.py::test_the_program_of_the_readme_runs",
    "tests/system/test_without_torch.py::test_a_device_without_torch_plans_for_itself",
    "tests/system/test_without_torch.py::test_an_agent_without_torch_carries",
    "tests/system/test_without_torch.py::test_devices_that_train_with_programs_learn_what_is_simulated[heart_pfl]",
    "tests/system/test_without_torch.py::test_devices_without_torch_are_given_a_kit_and_learn_what_is_simulated",
    "tests/system/test_without_torch.py::test_devices_without_torch_keep_their_kit",
    "tests/system/test_without_torch.py::test_where_nobody_has_torch",
    "tests/test_docs.py::test_the_site_builds",
)  # fmt: skip
"""Files and tests that ``make test`` leaves to ``make thorough``: what takes seconds and says at length, or of one more
algorithm, network, task or broker, what others say."""


LIKE_ANOTHER = {
    "before the batch, pieces", "before the batch, turned", "begun, as before", "begun, one more dimension",
    "begun, ones", "begun, parameter, rnn", "begun, repeated", "begun, sample", "begun, stacked", "begun, variable",
    "begun, zeros", "bounds, mixed", "bounds, multiplied", "cells", "changed, added to a piece",
    "changed, by methods", "changed, filled, read between", "changed, largest place", "changed, lengths",
    "changed, pieces", "changed, scattered", "classes by a convolution", "convnext", "convnext v2", "deep conv lstm",
    "dropout as functions", "ecapa", "experts", "frames, flatten", "frames, logits", "frames, mean",
    "frames, windows", "gpt", "gpt by hand", "gru by hand", "gru from zeros", "heeding", "last states, flat",
    "last states, joined", "last states, viewed", "learned filters", "looks again", "looks back", "median",
    "merged, flatten", "merged, sizes", "named products", "normalized by functions", "one block for both",
    "packed, mean", "packed, picked", "packed, summed", "packed, weighed", "packed, weighed both ways",
    "places looked up for each", "prototypes", "reversed", "rnn from zeros", "sentiment by GRU", "sentiment by LSTM",
    "shared blocks", "standardized weights", "sub-pixel", "sums", "tcn", "tcn with weight_norm", "ties",
    "translating, packed", "translating, packed both ways", "twins by extremes", "twins by sizes", "twins by sums",
    "u-net", "u-net by layers", "u-net by learned filters", "u-net by sizes", "video, pooled",
    "vit with torch's own dropout", "wavenet", "words one by one, numbers",
}  # fmt: skip
"""Ordinary networks of which each says what another does."""

ANOTHER_END = {
    "LSTMCell_new", "adapted_attention", "adapted_both_gru", "adapted_both_lstm", "adapted_gru", "adapted_lstm",
    "dropout_in_adapted_attention", "dropout_in_encoder", "dropout_in_gru", "dropout_in_gru_again", "dropout_in_lstm",
    "dropout_in_padded_attention", "dropout_in_rnn", "gru_both_all", "gru_both_ends", "gru_both_halves",
    "gru_both_mean", "gru_both_out", "gru_layers", "gru_only", "gru_out", "gru_state", "lstm_both_mean",
    "lstm_both_pair", "lstm_both_parts", "lstm_both_pieces", "lstm_layers", "lstm_state", "rnn_both_all",
    "stochastic_depth_in_convnext", "stochastic_depth_in_swin", "swin_of_odd_windows",
}  # fmt: skip
"""Layers as others, of which another end is read, or that have adapters or dropout beside."""

TWICE_AGAIN = {
    "GRUCell_learned", "LSTMCell_new", "RNNCell_none", "attention_across padded", "attention_fused",
    "attention_learned", "beside1", "bowed", "equalized", "extremes", "gains", "group_norm_by_function", "gru_only",
    "instance_norm_by_function", "logs", "nearest", "ordered", "resized", "rnn_both_out", "strided", "swin",
    "weight_norm_of_planes",
}  # fmt: skip
"""Layers of whose kind another one is differentiated twice."""

OTHER_HARM = {"03", "04", "05", "07", "08", "09", "11", "14", "17"}
"""Numbers of harmful updates of which others are a kind: bombs, headers, shapes, numbers."""

AGAIN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "tests/laws/test_algorithm_laws.py": lambda given: (
        given.get("setting") in ("masks", "adapters")  # of which there are both at once
        or (given.get("name") not in QUICK_LAWS and given.get("setting") in ("plain", "aggregated buffers", "sampling"))
        or (given.get("name") != "hermes" and str(given.get("setting")).startswith(("a ", "an ")))
        or str(given.get("setting")).endswith((" with adapters", " both ways"))
    ),
    "tests/system/test_every_algorithm.py": lambda given: (
        given.get("task", "classification") != "classification" or ":" in getattr(given.get("spec"), "name", "")
    ),
    "tests/export/test_served.py": lambda given: given.get("case", "pruned") not in ("pruned", "Gaussian head"),
    "tests/hostile/test_liars.py": lambda given: (
        given.get("name", "ffgg") != "ffgg" and (given["mode"] == "asynchronous" or given["name"] != "hermes")
    ),
    "tests/sdk/algorithms/test_trajectories.py": lambda given: given.get("setting") == "masks, adapters",
    "tests/sdk/model/test_any_network.py": lambda given: given.get("decade", 0) > 3,
    "tests/sdk/federated/test_kit.py": lambda given: given.get("name", "ditto") not in {*QUICK_LAWS, "ditto"},
    "tests/export/test_ordinary_networks.py": lambda given: given.get("name") in LIKE_ANOTHER,
    "tests/sdk/programs/test_ordinary.py": lambda given: given.get("name") in LIKE_ANOTHER,
    "tests/sdk/programs/test_parity.py": lambda given: (
        given.get("recipe") == "plain" or given.get("count") == 1 or given.get("name") in ANOTHER_END
    ),
    "tests/sdk/programs/test_vjp.py": lambda given: given.get("name") in TWICE_AGAIN,
    "tests/hostile/test_siege_uploads.py": lambda given: given.get("number") in OTHER_HARM,
    "tests/sdk/programs/test_tutorials.py": lambda given: given.get("name") in LIKE_ANOTHER,
    "tests/system/test_history.py": lambda given: given.get("seed", 0) > 31 or given.get("seed") in (8, 14),
}
"""In these files, of which of its parameters a test is left out."""


ONE_IN = {
    2: (
        "tests/export/test_matrix.py::test_personal_model_agrees_with_torch",
        "tests/hostile/test_liars.py::test_every_liar_is_shut_out_by_name_and_the_round_completes_with_the_honest",
        "tests/hostile/test_siege_uploads.py::test_an_update_made_to_harm_is_refused_and_the_round_completes",
        "tests/privacy/test_rule.py::test_with_either_engine_adapters_server_rules_and_half_the_bits_it_is_the_same_bytes",
        "tests/sdk/federated/test_kit.py::test_what_is_learned_from_a_kit_is_what_is_learned_with_torch_beside",
        "tests/sdk/model/test_zoo.py::test_half_the_channels_gone_equals_the_masked_dense_twin",
        "tests/sdk/model/test_zoo.py::test_parts_and_channel_groups",
        "tests/sdk/planning/test_latency_model.py::test_every_convolution_of_a_planned_model_keeps_the_blocked_form",
        "tests/sdk/programs/test_exact.py::test_a_step_says_what_torch_says",
        "tests/sdk/programs/test_tutorials.py::test_a_vision_transformer_learns_alike_on_both_engines",
        "tests/sdk/simulation/test_asynchrony.py::test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not",
        "tests/sdk/test_tasks.py::test_both_engines_learn_numbers_in_their_own_units",
        "tests/system/test_disasters.py::test_a_coordinator_that_lost_its_state_serves_its_fleet_again",
        "tests/system/test_disasters.py::test_a_device_that_lost_its_memory_takes_part_again_in_the_same_run",
    ),
    3: (
        "tests/laws/test_algorithm_laws.py::test_a_device_that_never_trained_is_served",
        "tests/laws/test_algorithm_laws.py::test_a_poor_client_neither_breaks_nor_poisons",
        "tests/laws/test_algorithm_laws.py::test_another_seed_gives_other_bits",
        "tests/laws/test_algorithm_laws.py::test_inputs_stay_untouched",
        "tests/laws/test_algorithm_laws.py::test_programs_learn_what_torch_learns_and_the_same_bits_twice",
        "tests/laws/test_algorithm_laws.py::test_the_personal_model_is_frozen_and_its_own",
        "tests/laws/test_algorithm_laws.py::test_the_same_seed_gives_the_same_bits",
        "tests/privacy/test_clipping.py::test_it_goes_where_the_share_asked_for_is_within",
        "tests/sdk/aggregate/test_byzantine.py::test_buckets_of_two_still_reach_the_optimum",
        "tests/sdk/algorithms/test_classic_conditions.py::test_learning_beats_the_start",
        "tests/sdk/algorithms/test_trajectories.py::test_three_rounds_go_as_they_went",
        "tests/sdk/federated/test_kit.py::test_every_algorithm_learns_and_serves_from_a_kit_what_it_does_where_torch_is",
    ),
    4: (
        "tests/laws/test_algorithm_laws.py::test_nor_is_what_it_learns_from_little_or_sends_in_short",
        "tests/sdk/aggregate/test_byzantine.py::test_robust_rules_reach_the_optimum",
        "tests/sdk/algorithms/test_classic_conditions.py::test_rounds_are_pure_repeatable_and_finite",
        "tests/sdk/model/test_any_network.py::test_whatever_may_be_pruned_is_exact_for_any_mask",
        "tests/sdk/programs/test_parity.py::test_each_layer_errs_no_more_than_twice_as_much_as_torch",
        "tests/sdk/programs/test_parity.py::test_what_a_mask_takes_its_program_takes_too",
        "tests/sdk/programs/test_tutorials.py::test_an_ordinary_network_learns_alike_on_both_engines",
        "tests/sdk/programs/test_vjp.py::test_a_derivatives_derivative_is_torchs",
    ),
}
"""Of the many cases of these, ``make test`` runs one in so many; ``make thorough`` the others."""
_EVERY = {name: every for every, names in ONE_IN.items() for name in names}


def is_thorough(nodeid: str, callspec: Any, seen: Counter[str]) -> bool:
    """Whether ``make test`` leaves it out; ``seen`` counts the cases of each test that came before, in their order."""
    again = AGAIN.get(nodeid.partition("::")[0])
    if nodeid.startswith(THOROUGH) or (again is not None and callspec is not None and again(callspec.params)):
        return True
    of = nodeid.partition("[")[0]
    seen[of] += 1
    # Each test begins with another, so that not all leave out the same.
    return (seen[of] + len(of)) % _EVERY.get(of, 1) > 0


WAITS = ("tests/system", "tests/hostile", "tests/coordinator", "tests/sdk/wire/test_mqtt.py")
"""Files that wait for processes, sockets and deadlines more than they compute."""
LONG = (
    "tests/laws/test_algorithm_laws.py", "tests/system/test_secure_fleet.py", "tests/system/test_in_process.py",
    "tests/hostile/test_liars.py", "tests/system/test_without_torch.py", "tests/system/test_demo.py",
    "tests/system/test_living.py", "tests/system/test_story.py", "tests/system/test_history.py",
    "tests/export/test_matrix.py", "tests/system/test_gateway.py",
    "tests/coordinator/test_store.py", "tests/system/test_load.py", "tests/system/test_identity.py",
    "tests/system/test_node_device.py", "tests/bench/test_simulation.py", "tests/system/test_every_algorithm.py",
    "tests/system/test_readme.py", "tests/test_docs.py", "tests/sdk/planning/test_planner.py",
    "tests/coordinator/test_api.py", "tests/coordinator/test_blobs.py", "tests/coordinator/test_maintenance.py",
    "tests/system/test_chaos.py", "tests/system/test_crashes.py", "tests/system/test_broker_abuse.py",
    "tests/system/test_tasks_over_mqtt.py", "tests/hostile/test_siege_messages.py",
    "tests/sdk/algorithms/test_trajectories.py", "tests/sdk/programs/test_parity.py",
    "tests/coordinator/test_connection_limits.py", "tests/bench/test_export.py", "tests/system/test_disasters.py",
    "tests/sdk/test_plugins.py", "tests/system/test_link_disasters.py", "tests/sdk/wire/test_mqtt.py",
    "tests/hostile/test_siege_uploads.py", "tests/sdk/algorithms/test_hermes.py", "tests/system/test_same_bytes.py",
    "tests/export/test_served.py", "tests/sdk/federated/test_kit.py", "tests/system/test_operator.py",
    "tests/coordinator/test_migrations.py", "tests/sdk/algorithms/test_ffgg.py",
    "tests/system/test_silent_database.py", "tests/sdk/planning/test_latency_model.py",
    "tests/system/test_failures.py", "tests/system/test_wheel.py", "tests/system/test_stranger.py",
    "tests/edge_client/test_deploy.py", "tests/system/test_stores.py", "tests/sdk/planning/test_foreign_models.py",
    "tests/sdk/simulation/test_experiment.py", "tests/laws/test_aggregator_laws.py",
    "tests/sdk/model/test_any_network.py", "tests/sdk/programs/test_hostile.py", "tests/sdk/model/test_zoo.py",
    "tests/system/test_broker_disasters.py", "tests/system/test_check.py", "tests/export/test_beyond_python.py",
    "tests/export/test_predictor.py", "tests/system/test_front_doors.py",
)  # fmt: skip
"""Files that take longest, in that order: one that begins last would keep all others waiting."""
