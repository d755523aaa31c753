"""The parts that start, feed and stop tritonserver."""
