"""Evaluation of a trained model: loss on held-out text, generation, chat and public tasks."""
