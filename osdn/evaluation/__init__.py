"""The paper's benchmarks for any causal model: `osdn eval` runs them, `osdn compare` tabulates results."""
