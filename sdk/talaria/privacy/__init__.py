"""Private by proof: sums that open only as sums, over the coordinates that devices keep, and a privacy budget.

Both halves of secure aggregation are state machines that decide and never send; what they say are bounded messages.
Beside them stand clipping, noise and the ledger of differential privacy, and the server rule that simulations use.
"""
