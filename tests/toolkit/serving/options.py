"""Values of sampling options that are not their defaults, found by what the options themselves take."""

from specdec.config import SAMPLING_OPTIONS

NUMBERS = [name for name, declared in SAMPLING_OPTIONS.items() if declared.meaning]  # that one flag gives


def other_number(name: str) -> float:
    """A number that the option takes, and that is not its default."""
    declared = SAMPLING_OPTIONS[name]
    for value in (0.5, 4):
        try:
            if (taken := declared.check(name, value)) != declared.default:
                return taken  # type: ignore[no-any-return]
        except (TypeError, ValueError):
            pass
    raise AssertionError(f"{name} takes none of these numbers: add one that it does")
