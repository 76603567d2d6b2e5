"""How much is measured unless it is said, by the commands and by a recipe's gate."""

MIN_CONTEXT = 3  # tokens of the shortest window with a scored one
CONTEXT = 512  # tokens of a window
PERPLEXITY_WINDOWS = 64
COMPARE_WINDOWS = 16
RETRIEVAL_CONTEXTS = (512, 1024, 2048)  # tokens
RETRIEVAL_SAMPLES = 50  # in each place of each context


def default_contexts(longest: int) -> tuple[int, ...]:
    """Of retrieval, by an engine with sequences of at most `longest` tokens."""
    return tuple(c for c in RETRIEVAL_CONTEXTS if c <= longest) or (longest,)
