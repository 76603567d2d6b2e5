"""Compiles the plugins' kernels for every SM and holds them to the gates, in a process of its own:
one that has set TRITON_INTERPRET can't. With --one-each, one variant of each kernel for some SMs.
Prints how many there are."""

import sys

from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES
from llmbuild.builder.targets.gpu.kernels import compile_kernels, registered_kernels, usable

if __name__ == "__main__":
    if "--one-each" in sys.argv:
        # Ampere's and Hopper's tensor cores, and those with tensor memory. The last of a kernel's
        # variants: attention's has FP8, which is of another type on SM 80.
        requests = registered_kernels((80, 90, 100))
        by_kernel = {(each.sm, each.variant.name.partition(".")[0]): each for each in requests}
        requests = list(by_kernel.values())
    else:
        requests = registered_kernels(CAPABILITIES)
    print(len(usable(compile_kernels(requests))))
