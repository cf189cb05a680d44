"""Samples: text that the model generates at each evaluation, in a file beside the run."""

import re
from pathlib import Path

from windlass import files
from windlass.evaluation.generate import Generator
from windlass.evaluation.sampling import Sampling
from windlass.processes import hosts
from windlass.program.step import Frozen, State
from windlass.run_folder import folder as folders
from windlass.training.session import Session


class Writer:
    """Writer of samples, generated from the prompt `train.sample`."""

    TITLE = "--- step "

    def __init__(self, session: Session, folder: Path):
        self.session, self.file = session, folder / folders.SAMPLES
        self.generator: Generator | None = None

    def __call__(self, done: int, state: State, frozen: Frozen) -> str:
        arrays = self.session.programs.finish(state.weights, frozen.model, state.carry)
        model = self.session.built.model(*arrays)
        vocabulary = self.session.prepared.vocabulary
        assert vocabulary is not None  # the session refuses samples without one
        if self.generator is None:
            self.generator = Generator(model, vocabulary)
        self.generator.renew(model)
        prompt = self.session.run.train.sample or ""
        (text,) = self.generator.generate(prompt, Sampling(temperature=0.5))
        if hosts.is_first():
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(f"{self.TITLE}{done}\n{prompt}{text}\n")
        return prompt + text

    def truncate(self, step: int) -> None:
        """Drop the samples after a step: a run that goes on from there writes them again."""
        if not hosts.is_first() or not self.file.exists():
            return
        if self.file.is_dir():  # and so is not what a run wrote
            files.put_aside(self.file)
            return
        text = self.file.read_bytes()  # in which somebody may have left what is not UTF-8
        titles = re.finditer(rf"^{self.TITLE}(\d+)$".encode(), text, re.MULTILINE)
        later = [title.start() for title in titles if int(title[1]) > step]
        if later:
            files.write(self.file, text[: later[0]])
