import threading
import time

from llmbuild.runtime.lock import FairLock


def test_only_one_thread_holds_the_lock_and_it_may_take_it_again():
    lock, inside, most = FairLock(), [0], [0]

    def work():
        for _ in range(300):
            with lock, lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert most == [1]


def test_thread_that_waits_comes_before_the_one_that_has_just_released():
    lock, turns, stop = FairLock(), [0], threading.Event()

    def hold_again_and_again():
        while not stop.is_set():
            with lock:
                turns[0] += 1
                time.sleep(0.001)

    holder = threading.Thread(target=hold_again_and_again)
    holder.start()
    missed = 0
    for _ in range(60):
        before = turns[0]
        with lock:
            missed += turns[0] - before
        time.sleep(0.001)
    stop.set()
    holder.join(timeout=30)
    assert missed <= 6  # some, where this thread had to wait for a processor before the lock


def test_lock_is_free_again_after_an_error():
    lock = FairLock()
    try:
        with lock:
            raise KeyError
    except KeyError:
        pass
    taken = []

    def take():
        with lock:
            taken.append(True)

    other = threading.Thread(target=take)
    other.start()
    other.join(timeout=30)
    assert taken
