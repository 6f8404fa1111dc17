"""The old place of ``kafkalite.loop_thread``."""

from kafkalite.loop_thread import LoopThread as LoopThread
from kafkalite.loop_thread import shared_loop_thread as shared_loop_thread
