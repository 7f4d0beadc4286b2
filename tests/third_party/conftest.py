"""The folders here are separate projects with their own tests: ../test_third_party.py runs them as installed."""

collect_ignore_glob = ["*"]
