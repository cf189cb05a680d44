"""Samples: text that the model generates at each evaluation, in a file beside the run."""

from pathlib import Path

from windlass.evaluation.generate import Generator
from windlass.processes import hosts
from windlass.program.step import Frozen, State
from windlass.run_folder import folder as folders
from windlass.run_folder import samples
from windlass.run_folder.samples import Sample
from windlass.training.session import Session


class Writer:
    """Writer of samples, generated from the prompt `train.sample` as `train.sampling` says."""

    def __init__(self, session: Session, folder: Path):
        self.session, self.file = session, folder / folders.SAMPLES
        self.generator: Generator | None = None
        train, format = session.run.train, session.run.data.format
        self.prompt = format.asked(train.sample or "", "train.sample")

    def __call__(self, done: int, state: State, frozen: Frozen) -> str:
        arrays = self.session.programs.finish(state.weights, frozen.model, state.carry)
        model = self.session.built.model(*arrays)
        vocabulary = self.session.prepared.vocabulary
        assert vocabulary is not None  # the session refuses samples without one
        if self.generator is None:
            self.generator = Generator(model, vocabulary)
        self.generator.renew(model)
        (text,) = self.generator.generate(self.prompt, self.session.run.train.sampling)
        if hosts.is_first():
            samples.append(self.file, Sample(done, self.prompt + text))
        return self.prompt + text

    def truncate(self, step: int) -> None:
        """Drop the samples after a step: a run that goes on from there writes them again."""
        if hosts.is_first():
            samples.truncate(self.file, step)
