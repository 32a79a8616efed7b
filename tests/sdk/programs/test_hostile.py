"""Files made to harm: each is refused with a clear error and allocates next to nothing."""

import json
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import onnx
import pytest

from talaria.errors import TalariaError, TooLarge, WireError
from talaria.programs import differentiate, onnx_file
from talaria.programs.given import Given
from talaria.programs.graph import Graph, Node, Port
from talaria.programs.making import Maker
from talaria.programs.program import Program, values_of
from talaria.programs.shapes import RULES, Limits, Value, measure
from talaria.programs.vjp import Vjp
from talaria.training.objectives import LOGITS

ROUNDS = 600
MOST = 64 << 20


def flip(data, rng):
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def cut_out(data, rng):
    begin = rng.randrange(len(data))
    return data[:begin] + data[begin + rng.randint(1, 60) :]


def insert(data, rng):
    place = rng.randint(0, len(data))
    return data[:place] + rng.randbytes(rng.randint(1, 60)) + data[place:]


def repeat(data, rng):
    begin = rng.randrange(len(data))
    piece = data[begin : begin + rng.randint(1, 400)]
    return data[:begin] + piece * rng.randint(2, 5) + data[begin:]


def number(data, rng):
    """A length, size or key that is huge."""
    place = rng.randrange(len(data))
    return data[:place] + b"\xff" * rng.randint(1, 9) + b"\x7f" + data[place + 1 :]


@pytest.mark.parametrize("how", [flip, cut, cut_out, insert, repeat, number])
def test_changed_bytes_are_refused_or_still_a_program(program_of, how):
    data = program_of("mlp")
    refused = 0
    tracemalloc.start()
    try:
        for seed in range(ROUNDS):
            changed = how(data, random.Random(seed))
            try:
                Program(changed)
            except TalariaError:
                refused += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused > ROUNDS * 0.8
    assert peak < MOST


def graph_of(data):
    return onnx_file.read(data)


def changed(data, **parts):
    graph, note = graph_of(data)
    return onnx_file.write(replace(graph, **parts), note)


@pytest.mark.parametrize("name", ["mlp", "sequence"])
def test_changed_graphs_are_refused_or_still_run_within_bounds(program_of, name):
    """Operators, their inputs, attributes and constants are swapped; the file itself is written well."""
    data = program_of(name)
    graph, note = graph_of(data)
    names = [*graph.constants, *(port.name for port in graph.inputs), *(n.outputs[0] for n in graph.nodes)]
    kinds = sorted({node.kind for node in graph.nodes} | {"Loop", "If", "Expand", "OneHot", "RandomNormal", *RULES})
    opened = 0
    for seed in range(ROUNDS):
        rng = random.Random(seed)
        nodes, constants = list(graph.nodes), dict(graph.constants)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(nodes))
            node = nodes[place]
            what = rng.randrange(5)
            if what == 0:
                node = replace(node, kind=rng.choice(kinds))
            elif what == 1 and node.inputs:
                swapped = list(node.inputs)
                swapped[rng.randrange(len(swapped))] = rng.choice(names)
                node = replace(node, inputs=tuple(swapped))
            elif what == 2:
                changes = [("axis", rng.choice([-1, 1 << 62, 3])), ("group", rng.choice([0, 1 << 40])), ("beta", 2.0)]
                node = replace(node, attributes=(rng.choice(changes),))
            elif what == 3:
                nodes[place], node = node, rng.choice(nodes)
            else:
                chosen = rng.choice([*constants])
                constants[chosen] = rng.choice([-1, 1 << 62, 0]) * np.ones_like(constants[chosen])
            nodes[place] = node
        try:
            program = Program(onnx_file.write(replace(graph, nodes=tuple(nodes), constants=constants), note))
        except TalariaError:
            continue
        opened += 1
        feed = {name: np.zeros(value.shape, value.dtype) for name, value in sizes(program).items()}
        try:
            program.run(feed)
        except WireError:
            continue
    assert 0 < opened < ROUNDS / 2


def sizes(program):
    return values_of(program.graph.inputs, program.manifest)


def bomb(kind):
    """A graph of a few operators that would fill the memory."""
    big = (1 << 20, 1 << 20)
    return {
        "expand": [Node("Expand", ("one", "big"), ("huge",)), Node("ReduceSum", ("huge", "axes"), ("loss2",))],
        "pad": [Node("Pad", ("one2", "pads", "one"), ("huge",))],
        "doubling": [Node("Concat", (f"w{i}", f"w{i}"), (f"w{i + 1}",), (("axis", 0),)) for i in range(60)],
    }[kind], {
        "one": np.array(1, np.float32),
        "one2": np.ones((1, 1), np.float32),
        "w0": np.ones(8, np.float32),
        "big": np.array(big, np.int64),
        "pads": np.array((0, 0, *big), np.int64),
        "axes": np.array((0, 1), np.int64),
    }


@pytest.mark.parametrize("kind", ["expand", "pad", "doubling"])
def test_bombs_are_refused_before_they_grow(program_of, kind):
    graph, note = graph_of(program_of("mlp"))
    nodes, constants = bomb(kind)
    bad = replace(graph, nodes=(*nodes, *graph.nodes), constants={**graph.constants, **constants})
    with pytest.raises(TooLarge, match="MiB"):
        Program(onnx_file.write(bad, note))


@pytest.mark.parametrize("kind", ["Add", "Mul"])
def test_whole_numbers_that_stand_in_a_file_make_no_more_than_a_table_of_places(program_of, kind):
    graph, note = graph_of(program_of("mlp"))
    many = np.arange(200_000)
    constants = {**graph.constants, "down": many[:, None], "across": many[None]}  # 300 GB of each with each
    bad = replace(graph, nodes=(Node(kind, ("down", "across"), ("huge",)), *graph.nodes), constants=constants)
    with pytest.raises(WireError, match="known numbers"):
        Program(onnx_file.write(bad, note))


def test_places_beyond_a_map_are_refused_as_a_sum_too(program_of):
    graph, note = graph_of(program_of("sequence"))
    summed = Node("Add", ("rows", "columns"), ("places",))
    for highest, refused in ((9, False), (10, True)):
        constants = {"table": np.zeros((2, 10), np.float32), "rows": np.array([[0], [5]])}
        constants["columns"] = np.array([[0, highest - 5]])
        looked = Node("Gather", ("table", "places"), ("under",), (("axis", 1),))
        more = {**graph.constants, **constants}
        data = onnx_file.write(replace(graph, nodes=(summed, looked, *graph.nodes), constants=more), note)
        if refused:
            with pytest.raises(WireError, match=r"places 0\.\.10 of 10"):
                Program(data)
        else:
            Program(data)


def test_what_onnx_allows_and_no_program_needs_is_refused(program_of):
    data = program_of("mlp")

    def edited(change):
        model = onnx.load_from_string(data)
        change(model)
        return model.SerializeToString()

    def external(model):
        tensor = model.graph.initializer[0]
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="/etc/passwd")

    def subgraph(model):
        body = onnx.helper.make_graph([], "body", [], [])
        model.graph.node.append(onnx.helper.make_node("Loop", ["", ""], ["v9999"], body=body))

    def function(model):
        model.functions.add(name="f", domain="d")

    def domain(model):
        model.opset_import.add(domain="com.example", version=1)

    def sparse(model):
        model.graph.sparse_initializer.add()

    for change in (external, subgraph, function, domain, sparse, lambda m: m.graph.node[0].ClearField("op_type")):
        with pytest.raises(WireError):
            Program(edited(change))


def test_files_and_graphs_beyond_the_limits_are_not_read(program_of, tmp_path):
    data = program_of("mlp")
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(TooLarge, match="bytes"):
        Program.open(path)
    assert tracemalloc.get_traced_memory()[1] < MOST
    tracemalloc.stop()
    for limits in (Limits(nodes=10), Limits(memory_bytes=1000), Limits(multiply_adds=1000), Limits(file_bytes=100)):
        with pytest.raises(TooLarge):
            Program(data, limits)


@pytest.mark.parametrize(
    ("was", "is_"),
    [
        ('"format":2', '"format":3'),
        ('"N":5', '"N":0'),
        ('"N":5', '"N":16777216'),
        ('"N":5', '"M":5'),
        ('"classes":4', '"classes":-4'),
        ('"classes":4', '"classes":"four"'),
        ('"trained":"all"', '"trained":["all"]'),
        ('"expected":{', '"expected":{"more":[1,1],'),
        ('"momentum":0.9', '"momentum":NaN'),
        ("{", "[" * 5000),
        ("}", "]" * 70000),
    ],
)
def test_manifests_that_cannot_be_are_refused(program_of, was, is_):
    graph, note = graph_of(program_of("mlp"))
    assert was in note
    with pytest.raises(WireError, match="program"):
        Program(onnx_file.write(graph, note.replace(was, is_, 1)))


def test_inputs_and_outputs_are_those_of_a_step(program_of):
    data = program_of("mlp")
    graph, _ = graph_of(data)
    for inputs, outputs in (
        (graph.inputs[1:], graph.outputs),
        ((*graph.inputs, graph.inputs[0]), graph.outputs),
        ((*graph.inputs, Port("secret", "float32", ())), graph.outputs),
        ((*graph.inputs, Port("weight/", "float32", ())), graph.outputs),
        ((*graph.inputs, Port("momentum/a", "int64", ())), graph.outputs),
        (graph.inputs, graph.outputs[1:]),
        (graph.inputs, (*graph.outputs, Port("v1", "float32", ()))),
        (graph.inputs, ()),
    ):
        with pytest.raises(WireError):
            Program(changed(data, inputs=inputs, outputs=outputs))


def test_what_follows_from_the_file_alone_is_held_all_at_once():
    """ONNX Runtime works it out while it loads the graph, and gives none of it back before it is done."""
    known = {"one": np.ones(1, np.float32), "axis": np.zeros(1, np.int64), "size": np.array([1 << 20], np.int64)}
    nodes, last = list[Node](), "x"
    for place in range(80):
        large, highest, after = f"large{place}", f"highest{place}", f"sum{place}"
        nodes.append(Node("Expand", (f"one{place}", "size"), (large,)))
        nodes.append(Node("ReduceMax", (large, "axis"), (highest,), (("keepdims", 0),)))
        nodes.append(Node("Add", (last, highest), (after,)))
        known[f"one{place}"], last = known["one"] * place, after
    graph = Graph((Port("x", "float32", (1,)),), (Port(last, "float32", (1,)),), tuple(nodes), known)
    with pytest.raises(TooLarge, match="MiB"):
        measure(graph, {"x": Value((1,))}, Limits(memory_bytes=256 << 20))


@pytest.mark.parametrize("axis", [(0,), "0", 0.5])
def test_an_axis_that_is_no_whole_number_is_refused(axis):
    """It was compared with zero: Python's own error came out."""
    node = Node("Concat", ("x", "x"), ("y",), (("axis", axis),))
    graph = Graph((Port("x", "float32", (1,)),), (Port("y", "float32", (2,)),), (node,), {})
    with pytest.raises(WireError, match="Concat"):
        measure(graph, {"x": Value((1,))}, Limits())


@pytest.mark.parametrize("shape", [("#-5",), ("#0",), (0,), ("#-1000000000000", 1)])
def test_a_size_below_one_is_refused(program_of, shape):
    graph, note = graph_of(program_of("mlp"))
    odd = Port("weight/odd", "float32", shape)
    with pytest.raises(WireError, match="no size for 'weight/odd'"):
        Program(onnx_file.write(replace(graph, inputs=(*graph.inputs, odd)), note))


@pytest.mark.parametrize("field", ["parity", "recipe", "expected"])
def test_a_number_beyond_all_floats_is_refused(program_of, field):
    graph, note = graph_of(program_of("mlp"))
    facts = json.loads(note)
    first = next(iter(facts[field]))
    facts[field][first] = [10**400, 1] if field == "expected" else 10**400
    with pytest.raises(WireError, match=f"manifest's {field}="):
        Program(onnx_file.write(graph, json.dumps(facts)))


def test_a_derivative_whose_taps_hang_on_slopes_is_refused(spec_of):
    graph, note = graph_of(differentiate.packed(spec_of("mlp"), None, (LOGITS,)))
    (tap,) = (port for port in graph.outputs if port.name.startswith("tap/"))
    odd = replace(
        graph,
        nodes=(*graph.nodes, Node("Identity", (f"slope/{LOGITS}",), ("tap/late",))),
        outputs=(*graph.outputs, replace(tap, name="tap/late")),
        inputs=(*graph.inputs, replace(tap, name="slope/late")),
    )
    with pytest.raises(WireError, match="hangs on slopes"):
        Vjp.read(onnx_file.write(odd, note))


def test_a_forward_pass_that_gives_no_features_is_refused(spec_of):
    graph = Maker(spec_of("mlp")).forward().graph
    odd = replace(
        graph,
        nodes=(*graph.nodes, Node("Identity", ("features",), ("others",))),
        outputs=(replace(graph.outputs[0], name="others"),),
    )
    with pytest.raises(WireError, match="'forward' gives no features"):
        Given(frozenset(), (), {}, {}, {"forward": onnx_file.write(odd, "")}).forward()
