"""What a run showed, rendered from its rows alone: any run can be rendered again, by a later farm.

`view` reads and digests; `terminal`, `markdown`, `html` and `junit` only write
it down; `live` shows a run while it lasts.
"""
