"""Sizes that are known only in a run: polynomials of named sizes, and whole quotients of such."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

Product = tuple["Factor", ...]  # in the order of their texts


@dataclass(frozen=True)
class Symbolic:
    """A sum of products, each so many times; equal where two are the same sum. What is no longer
    unknown becomes an int."""

    terms: frozenset[tuple[Product, int]]

    def __add__(self, other: "Size") -> "Size":
        total = Counter(dict(self.terms))
        for product, times in _terms(other):
            total[product] += times
        return _size(total)

    def __mul__(self, other: "Size") -> "Size":
        total: Counter[Product] = Counter()
        for left, times in self.terms:
            for right, more in _terms(other):
                total[tuple(sorted((*left, *right), key=str))] += times * more
        return _size(total)

    def __floordiv__(self, divisor: int) -> "Size":
        if all(times % divisor == 0 for _, times in self.terms):
            return _size(Counter({product: times // divisor for product, times in self.terms}))
        return _size(Counter({(Quotient(self, divisor),): 1}))

    def __sub__(self, other: "Size") -> "Size":
        return self + other * -1

    def __rsub__(self, other: int) -> "Size":
        return self * -1 + other

    __radd__, __rmul__ = __add__, __mul__

    def __str__(self) -> str:
        texts = [
            " * ".join([str(times)] * (times != 1 or not product) + [str(each) for each in product])
            for product, times in self.terms
        ]
        return " + ".join(sorted(texts))


@dataclass(frozen=True)
class Quotient:
    """Rounded down."""

    dividend: Symbolic
    divisor: int

    def __str__(self) -> str:
        return f"(({self.dividend}) // {self.divisor})"


Factor = str | Quotient
Size = int | Symbolic
Sizes = tuple[Size, ...]


def named(name: str) -> Symbolic:
    """A size that a run gives under this name."""
    return Symbolic(frozenset({((name,), 1)}))


def evaluate(size: Size, given: Mapping[str, int]) -> int:
    """A size in a run that gives the named ones."""
    if isinstance(size, int):
        return size
    return sum(
        times * prod(_factor(factor, given) for factor in product) for product, times in size.terms
    )


def _factor(factor: Factor, given: Mapping[str, int]) -> int:
    if isinstance(factor, Quotient):
        return evaluate(factor.dividend, given) // factor.divisor
    return given[factor]


def _terms(size: Size) -> frozenset[tuple[Product, int]]:
    return size.terms if isinstance(size, Symbolic) else frozenset({((), size)})


def _size(terms: Mapping[Product, int]) -> Size:
    left = {product: times for product, times in terms.items() if times}
    if not left.keys() - {()}:
        return left.get((), 0)
    return Symbolic(frozenset(left.items()))
