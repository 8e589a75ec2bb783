"""Training the networks of the zoo, so that their shipped weights can be made again."""

from netmoments.network.training.loop import Epoch, accuracy, checkpoint_of, correct, train, training_facts
from netmoments.network.training.recipe import RECIPES, Recipe

__all__ = ["RECIPES", "Epoch", "Recipe", "accuracy", "checkpoint_of", "correct", "train", "training_facts"]
