"""A θ_k that begins late: until then Θ learns alone, which costs half.

The paper's listings take θ_k^(0) as given, and Θ does not depend on θ_k ("can be optimized
independently", section 3.3). So θ_k^(0) may as well be the Θ of a later round.
"""

from typing import Self

from pydantic import Field

from ssfl.algorithms.base import Algorithm, AlgorithmOptions
from ssfl.algorithms.global_ssfl import GlobalSSFL, GlobalSSFLOptions


class LateOptions(AlgorithmOptions):
    """When θ_k begins."""

    begin: float = Field(0.0, ge=0, lt=1)
    """Share of the rounds after which θ_k begins, as the Θ its client is then sent; with the last
    round at the latest. Until then rounds are Global-SSFL's."""

    def within(self, rounds: int) -> Self:
        return self.model_copy(update={"begin": min(self.begin, (rounds - 1) / rounds)})

    def first_round(self, rounds: int) -> int:
        """The first of so many rounds in which θ_k moves."""
        begin = self.within(rounds).begin
        return next(r for r in range(rounds) if r / rounds >= begin)


class Late(Algorithm):
    """Base of algorithms whose θ_k may begin late. Their Θ has to move as in Global-SSFL."""

    def __init__(self, options: LateOptions) -> None:
        super().__init__(options)
        self.begin = options.begin
        self._alone = GlobalSSFL(GlobalSSFLOptions())

    def at(self, progress: float) -> Algorithm:
        return self if progress >= self.begin else self._alone
