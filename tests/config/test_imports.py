"""What it costs to read a recipe."""

import subprocess
import sys


def test_reading_a_recipe_starts_no_accelerator_and_no_client():
    heavy = "{'jax', 'torch', 'transformers', 'huggingface_hub', 'wandb', 'trackio', 'datasets'}"
    script = (
        "import sys, windlass, windlass.config\n"
        "windlass.config.load({'train.batch': 3}, ['train.steps=2']).merged('tpu')\n"
        f"print(*{heavy} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
