import subprocess
import sys

LEAVES = """
import atexit, concurrent.futures, sys, threading, time
from toolkit.launching.ranks import leave

class Last:
    def __del__(self):
        print("torn down")

last = Last()
atexit.register(print, "exit handler")
threading.Thread(target=lambda: (time.sleep(0.3), print("own thread"))).start()
pool = concurrent.futures.ThreadPoolExecutor()  # its threads wait for work until they are told
pool.submit(print, "pooled").result()
sys.stdout.write("no newline|")
leave({code})
"""


def test_a_rank_leaves_after_its_threads_and_handlers_and_before_the_interpreter_ends():
    for code in (0, 3):
        done = subprocess.run(
            [sys.executable, "-c", LEAVES.replace("{code}", str(code))],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout == "pooled\nno newline|own thread\nexit handler\n"
        assert not done.stderr
