"""`windlass plan`: what it says, and what it refuses."""

import pytest


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["plan"],
            "which recipe? A YAML file, or chat-dpo, chat-lora, legal-cot-sft or quickstart",
        ),
        (
            ["plan", "quickstart", "--on", "v5e-8", "--rows", "none"],
            '--rows is "none"; it must be a whole number or null',
        ),
        (
            ["plan", "quickstart", "--on", "v5e-8", "--rows", "0"],
            "--rows is 0; it must be 1 or more",
        ),
        (
            ["plan", "quickstart,quickstat", "--on", "v5e-8"],
            'no file or recipe named "quickstat"; did you mean quickstart? there are chat-dpo, '
            "chat-lora, legal-cot-sft and quickstart",
        ),
        # Said once, and not for each target.
        (
            ["plan", "quickstart", "--on", "v5e-8,v6e-1", "train.btch=8"],
            "1 problem in quickstart and the command line:\n"
            "  train.btch  unknown; did you mean batch?",
        ),
        (
            ["plan", "quickstart", "--on", "v5e-8,v6e-4", "train.batch=7", "mesh.fsdp=3"],
            "on v5e-8: 1 problem in quickstart and the command line:\n"
            "  mesh.fsdp  is 3; it must divide the 8 devices: 1, 2, 4 or 8\n"
            "on v6e-4: 1 problem in quickstart and the command line:\n"
            "  mesh.fsdp  is 3; it must divide the 4 devices: 1, 2 or 4",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_message(program, words, message):
    done = program(*words)
    assert (done.code, done.out, done.err) == (2, "", f"{message}\n")
