"""The front door, `import ssfl`: every name leads somewhere, and a typo is seen beforehand."""

from pathlib import Path

import pytest

import ssfl

INIT = Path(ssfl.__file__)


@pytest.mark.parametrize("name", ssfl.__all__)
def test_every_name_of_the_front_door_leads_somewhere(name):
    assert getattr(ssfl, name).__name__ == name


def test_a_type_checker_sees_a_name_that_is_not_there(tmp_path):
    mypy = pytest.importorskip("mypy.api")
    script = tmp_path / "script.py"
    script.write_text("import ssfl\n\nssfl.train\nssfl.trian\n")
    alone = ["--follow-imports=skip", f"--cache-dir={tmp_path}", "--config-file="]
    found, _, _ = mypy.run([*alone, str(script), str(INIT)])
    (line,) = [line for line in found.splitlines() if ": error:" in line]
    assert line.startswith(f'{script}:4: error: Module has no attribute "trian"')
