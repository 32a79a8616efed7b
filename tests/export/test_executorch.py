from importlib.util import find_spec

import pytest

from talaria.errors import ConfigError
from talaria_export.executorch import export_pte


def test_program_agrees_with_torch_or_the_package_is_named(imu, tmp_path):
    """The package is large and optional, so both of its states are tested by what is there."""
    path = tmp_path / "me.pte"
    if find_spec("executorch") is None:
        with pytest.raises(ConfigError, match=r"talaria\[executorch\]"):
            export_pte(imu.model, imu.x, path)
        assert not path.exists()
    else:
        data = export_pte(imu.model, imu.x, path)
        assert path.read_bytes() == data
        assert len(data) < 1.3 * 4 * sum(p.numel() for p in imu.model.parameters())
