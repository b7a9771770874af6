"""The plan spaces of one device, in words: what a certificate's bound speaks of."""

from adjcomp.passes.schedule.nested import MOST_STORED

SPACE = (
    "one device, time-major; one of the listed chunk lengths; each chunk holds the internals of its top tiles, or of its head "
    "without the head's input, from the forward and recomputes the others from the border in one pass, in which each tile keeps "
    "its internals or its input; or nested: only the last chunk holds anything, at most "
    f"{MOST_STORED} borders (or 2^27 / C^2 for C chunks, where that is more) are stored at a time, and the others are recomputed "
    "from those"
)
LAYERED_SPACE = (
    "; or layer-major: two or more segments of layers, each of which holds the internals of all its chunks from the forward or "
    "recomputes each chunk in one pass that keeps internals"
)
SPILLED_SPACE = (
    "; or spilled: borders are offloaded to the host when they are made and fetched one column before they are needed, or each "
    "into the place of the one that was just dropped, with the places of two sets of borders, or of one, set aside on the "
    "device; all borders, or those of the oldest chunks, which then hold nothing; or in two tiers: nested, where the deepest of "
    "the stored borders wait on the host"
)
ROUNDED_SPACE = (
    "; or rounded: borders are kept in bfloat16 from when they are made until one column before they are needed, with the place "
    "of a set of borders in their own precision set aside"
)
