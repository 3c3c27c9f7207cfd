import torch

from sfumato.training.threads import settle_threads


def test_the_users_word_stays(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert settle_threads() == before == torch.get_num_threads()


def test_one_or_all_threads_are_used_and_the_choice_is_in_force(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        torch.set_num_threads(2)
        assert settle_threads() in (1, 2)
        assert settle_threads() == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
