"""Calls that a thread puts in line for an event loop."""

import asyncio
import threading

from talaria.wire.post import Post


def test_the_loop_is_woken_once_for_what_waits_and_an_error_loses_nothing_behind_it():
    async def story() -> tuple[list[object], list[str]]:
        loop, errors, woken = asyncio.get_running_loop(), list[str](), 0
        loop.set_exception_handler(lambda _, context: errors.append(str(context["exception"])))
        wake, done, post = loop.call_soon_threadsafe, list[object](), Post(loop)

        def counted(*what: object) -> object:
            nonlocal woken
            woken += 1
            return wake(*what)

        loop.call_soon_threadsafe = counted

        def put() -> None:
            for number in range(5):
                post.put(done.append, number)
            post.put(lambda: 1 / 0)
            for number in range(5, 10):
                post.put(done.append, number)

        thread = threading.Thread(target=put)
        thread.start()
        thread.join()  # the loop did nothing meanwhile
        done.append(woken)
        await asyncio.sleep(0.01)
        return done, errors

    assert asyncio.run(story()) == ([1, *range(10)], ["division by zero"])


def test_what_is_put_in_line_for_a_closed_loop_is_nobodys():
    loop = asyncio.new_event_loop()
    post = Post(loop)
    loop.close()
    post.put(print)
