"""A call to the critic-server whose answer is lost is repeated, but its work is done only once."""

import numpy as np

from common.clients.critic import CriticClient
from common.settings.config import Config
from services.critic.app import create_critic_app
from tests.support.batches.critic import make_rows, make_sequences
from tests.support.processes.lossy_proxy import LossyProxy
from trainer.backends.server import BackgroundServer


async def test_a_critic_whose_answers_are_lost_learns_what_another_one_does(config: Config) -> None:
    rows, sequences, results = make_rows(6, seed=0), make_sequences(5), []
    for loses in (False, True):
        with BackgroundServer(create_critic_app(config), "127.0.0.1", 0) as server:
            proxy = LossyProxy(server.port)
            async with proxy.running() as url:
                url = url if loses else f"http://127.0.0.1:{server.port}"
                async with CriticClient("critic-server", url, deadline_s=120) as client:
                    await client.restore("a", 0)
                    await client.update("a", 0, seed=1, rows=rows)
                    await client.save("a", 1, keep=2)
                    results.append(np.concatenate(await client.values(sequences, "a", 1)))
                    assert (await client.status()).step == 1
        if loses:
            assert {
                call: count for call, count in proxy.forwarded.items() if call.startswith("POST")
            } == dict.fromkeys(("POST /restore", "POST /update", "POST /save", "POST /values"), 2)
    np.testing.assert_array_equal(results[0], results[1])
