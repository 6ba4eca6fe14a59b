"""How many examples a property test draws: fewer under hypothesis's profile `quick`, which `make
test` uses."""

import hypothesis


def examples(number: int) -> int:
    """`number`, or a tenth of it, and five at least, under the profile `quick`."""
    return max(5, number // 10) if hypothesis.settings.get_current_profile_name() == "quick" else number
