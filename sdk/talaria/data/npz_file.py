"""``npz:FILE``: any user's arrays from a file, in the form of :mod:`talaria.recorded`, as a federated dataset."""

from pathlib import Path

from talaria import recorded, tasks
from talaria.data import arrays
from talaria.data.federated import Federated


def load(
    *,
    path: Path,
    validation: float = 0.1,
    test: float = 0.2,
    layout: str = "auto",
    standardize: bool = True,
    seed: int = 0,
    task: str = tasks.CLASSIFICATION,
    clients: int | None = None,
    alpha: float | None = None,
    newcomers: int | tuple[str, ...] = 0,
) -> Federated:
    """The dataset in ``path``.

    **Values.** uint8 is taken for pixels and divided by 255. Other numbers become float32 and, with
    ``standardize``, are z-scored by the mean and standard deviation of all clients' training samples: per channel
    for series and images, per feature for tables. Tokens stay what they are with ``standardize=False``; embeddings take
    them so.

    **Layout.** What a model sees is (features), (channels, time) or (channels, height, width). With ``"auto"``: 4
    dimensions with 1, 3 or 4 at the end and not after N are channels-last and are turned; 3 dimensions are one-channel
    images where they are uint8 or square from 8 x 8, else series, of which the shorter side is the channels; where
    each step has a class, the side with as many steps as ``y`` is the time. ``meta`` says what was done; ``layout``
    says otherwise.

    **Several named inputs**, ``x_NAME`` in the file, stand side by side as (N, numbers) and keep their layout; floats
    are z-scored by the channels of each, tokens (whole numbers) and masks (bool) stay as they are.

    **Labels** may be any integers, or text: they become 0..C-1 in their order and keep their names. What stands for a
    label that is not known (an empty text, NaN, -1 beside classes from 0 up) is refused. Clients too may be numbers or
    text; without them all samples are one client's.

    **One pool.** Samples that are nobody's are dealt over ``clients``: evenly at random, or with ``alpha`` label by
    label in shares drawn from Dirichlet(alpha), .1 skewed and 100 nearly even, ten samples to each at least where there
    are so many (:func:`talaria.data.partition.dirichlet`). Where targets are no classes, ``alpha`` skews sizes alone.

    **Newcomers.** Clients of these names, or so many that ``seed`` draws, take no part in the training; they come when
    it is over, and their samples scale nobody's.

    **Split.** Without one, each client's samples are cut at random, alike for each label: ``test`` of them test,
    ``validation`` of them validate, the rest train (0.2, 0.1, 0.7). With one, only a client that has no validation
    sample gets its share from its training part. Samples of ``split`` 3 become the client's ``unlabelled``, scaled as
    all others. Where neighbouring samples overlap (sliding windows), give a split: a random cut would put halves of the
    same second into train and test.

    :class:`DataError` names the array, the value and the mend.
    """
    found = arrays.fields_of(
        recorded.read(path), validation=validation, test=test, layout=layout, standardize=standardize, seed=seed,
        task=task, clients=clients, alpha=alpha, newcomers=newcomers,
    )  # fmt: skip
    return Federated(name=f"npz:{path.name}", **found)
