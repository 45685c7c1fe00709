"""Graders, which give completions their rewards; their specs, which tasks pass; and the code that runs them, in
`tasks.graders.running`. An exception of a grader never becomes a reward.

Recipes import graders from here: `from tasks.graders import BaseGrader, Grade, LastNumber`. The first use of a name
loads its module.
"""

from typing import TYPE_CHECKING

from storage.lazy_names import lazy_names

if TYPE_CHECKING:
    from tasks.graders.base import BaseGrader as BaseGrader
    from tasks.graders.base import FunctionGrader as FunctionGrader
    from tasks.graders.base import Grade as Grade
    from tasks.graders.base import IgnoreGradeException as IgnoreGradeException
    from tasks.graders.code import CodeGrader as CodeGrader
    from tasks.graders.combined import CombinedGrader as CombinedGrader
    from tasks.graders.gym import ReasoningGymGrader as ReasoningGymGrader
    from tasks.graders.judges import BinaryJudgeGrader as BinaryJudgeGrader
    from tasks.graders.judges import BinaryShot as BinaryShot
    from tasks.graders.maths import MathsGrader as MathsGrader
    from tasks.graders.range_judge import RangeJudgeGrader as RangeJudgeGrader
    from tasks.graders.rules import ExactMatch as ExactMatch
    from tasks.graders.rules import LabelMatch as LabelMatch
    from tasks.graders.rules import LastNumber as LastNumber
    from tasks.graders.rules import RegexMatch as RegexMatch
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
