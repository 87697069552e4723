"""A reward for tests of runs, in a module of its own: the processes that compute it import nothing
else.
"""


def coin(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """The same reward for all completions of every second prompt, so that a filter has something to
    drop.
    """
    return [0.0 if int(p.split()[2]) % 2 else float(i % 2) for i, p in enumerate(prompts)]
