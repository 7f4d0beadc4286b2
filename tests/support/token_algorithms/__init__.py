"""What tests of algorithms over tokens share: a model of a few numbers, and losses of numbers that are given."""
