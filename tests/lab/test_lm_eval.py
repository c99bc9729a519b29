"""lm-eval's log likelihoods and texts of a demo server, if it is installed: those of transformers
on torch.

`pip install 'lm-eval[api]'` where its command is found; `.ci/nightly` does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import demo_engine, serving

pytest.importorskip("torch", reason="the oracle is transformers on torch")
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(shutil.which("lm_eval") is None, reason="there is no lm_eval"),
]
ROOT = Path(__file__).parents[2]


def test_log_likelihoods_are_those_of_transformers(tmp_path: Path) -> None:
    """The command is that of docs/guides/serving.md."""
    with serving(demo_engine(max_num_seqs=8, num_blocks=257), served_model_name="demo") as server:
        url, tasks = f"{server.address}/v1/completions", "jaxpage_choose,jaxpage_tale,jaxpage_go_on"
        model = f"model=demo,base_url={url},tokenizer=jaxpage/demo,num_concurrent=4,max_length=512"
        command = [
            "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            model,
            "--include_path",
            "tools/lab/lm_eval",
        ]
        command += [
            "--tasks",
            tasks,
            "--batch_size",
            "8",
            "--output_path",
            str(tmp_path),
            "--log_samples",
        ]
        environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert result.returncode == 0, result.stderr
    [results] = (tmp_path / "demo").glob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    assert scores["jaxpage_choose"]["acc,none"] == 1.0
    assert scores["jaxpage_tale"]["byte_perplexity,none"] == pytest.approx(2.6003, abs=1e-3)
    command = [
        sys.executable,
        "tools/lab/lm_eval/compare.py",
        str(tmp_path / "demo"),
        "jaxpage/demo",
    ]
    compared = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "14 texts" in compared and "0 wrongly called greedy" in compared
