"""One device, alone: plan for this hardware, fit offline, export, and predict without torch.

python examples/alone.py
"""

import tempfile
from pathlib import Path

import talaria
from talaria.data import load
from talaria_export import Predictor


def main() -> None:
    wearer = load("smartwatch").clients["s01-left"]
    spec = talaria.ModelSpec("imu_cnn", (6, 100), 7)
    personal = talaria.Personalizer(spec, budget=talaria.Budget(latency_ratio=0.6, upload_mb=1))
    personal.fit(wearer.train, wearer.val)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "me.talaria"
        personal.export(path)
        labels = Predictor(path)(wearer.test.x).index
        right = (labels == wearer.test.y).mean()
        print(f"{len(labels)} windows, {right:.1%} right, bundle {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
