"""Prints how many lines each model family takes: its file, and its entries in the list of them."""

import inspect
import statistics

from llmbuild.builder.models.families import FAMILIES
from llmbuild.builder.models.table import module_of

IN_THE_LIST = 2  # the import and the entry in FAMILIES


def main() -> None:
    counts = {
        family.name: len(inspect.getsource(module_of(family)).splitlines()) + IN_THE_LIST
        for family in FAMILIES
    }
    for name, count in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{name:20} {count:4}")
    print(f"{'median':20} {statistics.median(counts.values()):4g}")


if __name__ == "__main__":
    main()
