"""The paper's own figures for what this package measures, by preset, with the table each comes from."""

# Table "Direct mechanism diagnostic on repeated-recall prompts, both scales".
RESIDUAL_RATIOS: dict[str, dict[str, float]] = {
    "delta_net-340m": {
        "q_geo": 0.537, "q_arith": 0.636, "fda_twice": 0.555, "swde_twice": 0.490, "squad_twice": 0.592,
    },
    "osdn-340m": {
        "q_geo": 0.433, "q_arith": 0.566, "fda_twice": 0.453, "swde_twice": 0.385, "squad_twice": 0.487,
    },
    "osdn-apf-340m": {
        "q_geo": 0.425, "q_arith": 0.573, "fda_twice": 0.452, "swde_twice": 0.378, "squad_twice": 0.459,
    },
    "delta_net-1.3b": {
        "q_geo": 0.432, "q_arith": 0.546, "fda_twice": 0.455, "swde_twice": 0.387, "squad_twice": 0.473,
    },
    "osdn-apf-1.3b": {
        "q_geo": 0.265, "q_arith": 0.484, "fda_twice": 0.375, "swde_twice": 0.309, "squad_twice": 0.102,
    },
}  # fmt: skip

# Tables "Inference throughput and persistent recurrent-state size at matched 340M scale" and "Inference
# throughput for the 1.3B / 100B scaling pair": tokens a second, milliseconds of decoding, and the change in
# tokens a second against the baseline as printed, %.
THROUGHPUT: dict[str, tuple[float, float, float | None]] = {
    "delta_net-340m": (784.5, 2735.5, None),
    "osdn-340m": (782.7, 2740.5, -0.2),
    "osdn-apf-340m": (767.2, 2796.2, -2.2),
    "gdn-340m": (882.9, 2429.7, None),
    "osgdn-340m": (865.1, 2469.7, -2.0),
    "osgdn-apf-340m": (865.4, 2466.6, -2.0),
    "kda-340m": (761.1, 2817.6, None),
    "oskda-340m": (803.0, 2665.9, 5.5),
    "oskda-apf-340m": (771.9, 2774.0, 1.4),
    "delta_net-1.3b": (794.0, 2702.4, None),
    "osdn-apf-1.3b": (739.9, 2899.2, -6.8),
}

# How the paper spells the variants.
TITLES: dict[str, str] = {
    "delta_net": "DeltaNet",
    "osdn": "OSDN",
    "osdn-apf": "OSDN-APF",
    "gdn": "GDN",
    "osgdn": "OSGDN",
    "osgdn-apf": "OSGDN-APF",
    "kda": "KDA",
    "oskda": "OSKDA",
    "oskda-apf": "OSKDA-APF",
}
