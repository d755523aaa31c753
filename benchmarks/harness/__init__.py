"""What measures, and what shows it: processes, environments, load generators, results, tables, charts."""
