"""What stands here are projects of their own, with tests of their own: ../test_third_party.py runs them as installed."""

collect_ignore_glob = ["*"]
