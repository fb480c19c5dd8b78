"""Half a minute of the soak test in which adapters change under load."""

from pathlib import Path

import pytest
import torch

from tests.soak.lora.run import LoraSoak, Options

MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"


@pytest.mark.slow
async def test_every_answer_is_its_adapters_and_nothing_is_left(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    options = Options(model=MODEL, seconds=15, seed=7, contents=10, growth=False)
    result = await LoraSoak(options, tmp_path).run()
    assert result.problems == []
    assert result.counts["answers that tell who they are"] > 50
