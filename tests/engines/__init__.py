"""A package, so that it is not on the path itself: ``vllm`` and ``sglang`` are the engines' own names."""
