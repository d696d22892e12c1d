"""The last import of a process that others are forked from: its objects are no garbage, and no child looks for any.

A child's collector would walk everything that was imported whenever it imports more, and copy the pages: half of the
CPU time that a rank took to start.
"""

import gc

gc.collect()
gc.freeze()
