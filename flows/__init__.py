"""The loops a person runs, deploys and schedules; each reads like its algorithm.

Recipes import the public names from here: `from flows import GRPO, Dataset, Model, RecipeContext, recipe_main`.
Importing this package loads neither torch nor Prefect; the first use of a name loads its module.
"""

from typing import TYPE_CHECKING

from storage.lazy_names import lazy_names

if TYPE_CHECKING:
    from flows.catalogue import *  # noqa: F403  the training classes
    from flows.loggers import get_prod_logger as get_prod_logger
    from flows.parameters import Dataset as Dataset
    from flows.parameters import Grader as Grader
    from flows.parameters import Model as Model
    from flows.parameters import dataset_kinds as dataset_kinds
    from flows.recipe import InputConfig as InputConfig
    from flows.recipe import RecipeContext as RecipeContext
    from flows.recipe import recipe_main as recipe_main
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
