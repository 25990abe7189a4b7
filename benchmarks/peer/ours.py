"""The work in ssfl: one host per worker in this process, as `ssfl train` has it."""

from round import federation

from peer.work import Clock, Setting, work


def play(setting: Setting) -> Clock:
    config, data, loop = work(setting)
    server = federation(config, data, setting.workers)
    clock = Clock(loop)
    for _ in range(setting.rounds):
        clock.begin()
        server.play_round()
        clock.end(lambda: server.layout.tensors(server.theta))
    return clock
