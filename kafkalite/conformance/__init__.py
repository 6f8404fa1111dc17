"""The protocol as data (``schema``), and checks that a server speaks it (``suite``). ``kl conformance``."""
