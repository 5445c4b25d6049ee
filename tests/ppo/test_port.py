"""The port of TRL's example in docs/from_trl.md, with tiny models in place of the named ones."""

from __future__ import annotations

import re
from pathlib import Path

from ppo.train import main

PAGE = Path(__file__).parents[2] / "docs" / "from_trl.md"


def test_the_port_trains(folders: dict[str, str], tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "tldr.yaml").write_text(text, encoding="utf-8")
    small = {
        **folders,
        "output_dir": tmp_path / "runs",
        "steps": 1,
        "rollout.batch_size": 4,
        "rollout.max_new_tokens": 5,
    }
    flags = [f"--{key}={value}" for key, value in small.items()]
    assert main(["--config", str(tmp_path / "tldr.yaml"), *flags]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "actor" / "config.json").is_file()
