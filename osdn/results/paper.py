"""The paper's figures for everything this package measures, by model and table.

Tables are as the paper prints them, one model per line; columns are named as in our result files.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """A table of the paper: its title and {model: {column: figure}}, without the cells it leaves empty."""

    title: str
    rows: dict[str, dict[str, float]]


def _printed(title: str, columns: str, text: str) -> Printed:
    lines = (line.split() for line in text.strip().splitlines())
    rows = {
        model: {name: float(x) for name, x in zip(columns.split(), cells, strict=True) if x != "–"}
        for model, *cells in lines
    }
    return Printed(title, rows)


MAIN = _printed(
    "Main results: matched 340M runs and 1.3B / 100B scaling",
    "lm_ppl pg19_ppl recall recall_single "
    "recall_repeated repeated_change commonsense longbench throughput_change",
    """
    delta_net-340m    32.00  20.78  0.150  0.155  0.145      –  0.457  0.072      –
    osdn-340m         31.67  20.02  0.198  0.179  0.218 +0.073  0.456  0.087   -0.2
    osdn-apf-340m     30.99  19.85  0.176  0.152  0.199 +0.054  0.456  0.073   -2.2
    gdn-340m          30.01  20.11  0.154  0.169  0.139      –  0.463  0.073      –
    osgdn-340m        29.78  19.70  0.182  0.169  0.195 +0.056  0.463  0.073   -2.0
    osgdn-apf-340m    29.50  20.21  0.203  0.185  0.221 +0.082  0.458  0.080   -2.0
    kda-340m          26.75  18.73  0.168  0.187  0.150      –  0.470  0.088      –
    oskda-340m        27.93  18.53  0.175  0.218  0.133 -0.017  0.470  0.090   +5.5
    oskda-apf-340m    28.02  19.00  0.185  0.191  0.179 +0.029  0.473  0.098   +1.4
    delta_net-1.3b    14.28      –  0.260  0.293  0.227      –  0.560  0.115      –
    osdn-apf-1.3b     14.22      –  0.266  0.315  0.217 -0.010  0.566  0.116   -6.8
""",
)

PERPLEXITY = _printed(
    "Language-model perplexity summary, full matched 340M sweep",
    "fineweb_edu_ppl wikitext_ppl lambada_ppl lm_ppl nll_change",
    """
    delta_net-340m    12.43  28.73  35.65  32.00      –
    osdn-340m         12.32  28.57  35.09  31.67 -0.011
    osdn-apf-340m     12.39  28.07  34.21  30.99 -0.032
    gdn-340m          11.97  27.43  32.83  30.01      –
    osgdn-340m        12.04  27.85  31.84  29.78 -0.008
    osgdn-apf-340m    12.07  27.80  31.31  29.50 -0.017
    kda-340m          11.38  26.56  26.95  26.75      –
    oskda-340m        11.69  26.42  29.54  27.93 +0.043
    oskda-apf-340m    11.70  26.60  29.52  28.02 +0.046
""",
)

RECALL = _printed(
    "In-context recall, JRT-style cloze at 2K context, full matched 340M rows",
    "fda swde squad recall_single fda_twice swde_twice squad_twice recall_repeated recall",
    """
    delta_net-340m    0.087  0.089  0.287  0.155  0.045  0.158  0.231  0.145  0.150
    osdn-340m         0.077  0.156  0.303  0.179  0.044  0.227  0.383  0.218  0.198
    osdn-apf-340m     0.066  0.098  0.292  0.152  0.076  0.215  0.307  0.199  0.176
    gdn-340m          0.088  0.134  0.286  0.169  0.035  0.180  0.203  0.139  0.154
    osgdn-340m        0.108  0.112  0.288  0.169  0.042  0.158  0.385  0.195  0.182
    osgdn-apf-340m    0.095  0.155  0.306  0.185  0.049  0.243  0.371  0.221  0.203
    kda-340m          0.088  0.152  0.321  0.187  0.041  0.224  0.184  0.150  0.168
    oskda-340m        0.146  0.180  0.327  0.218  0.063  0.180  0.156  0.133  0.175
    oskda-apf-340m    0.112  0.159  0.301  0.191  0.057  0.203  0.277  0.179  0.185
""",
)

COMMONSENSE = _printed(
    "Commonsense and short-context language understanding, full matched 340M sweep",
    "piqa hellaswag winogrande arc_easy arc_challenge social_iqa boolq lambada commonsense",
    """
    delta_net-340m    0.650  0.391  0.519  0.526  0.262  0.381  0.611  0.312  0.457
    osdn-340m         0.662  0.393  0.520  0.498  0.281  0.385  0.591  0.320  0.456
    osdn-apf-340m     0.651  0.399  0.516  0.506  0.286  0.381  0.594  0.319  0.456
    gdn-340m          0.666  0.410  0.507  0.520  0.282  0.389  0.601  0.330  0.463
    osgdn-340m        0.669  0.405  0.507  0.516  0.276  0.390  0.607  0.332  0.463
    osgdn-apf-340m    0.647  0.408  0.511  0.513  0.281  0.378  0.595  0.330  0.458
    kda-340m          0.666  0.416  0.520  0.525  0.275  0.393  0.610  0.356  0.470
    oskda-340m        0.668  0.418  0.538  0.541  0.288  0.390  0.558  0.358  0.470
    oskda-apf-340m    0.681  0.417  0.532  0.531  0.283  0.378  0.611  0.351  0.473
""",
)

GENERAL = _printed(
    "General benchmark checks at matched 340M scale",
    "commonsense recall longbench pg19_ppl",
    """
    delta_net-340m    0.457  0.150  0.072  20.78
    osdn-340m         0.456  0.198  0.087  20.02
    osdn-apf-340m     0.456  0.176  0.073  19.85
    gdn-340m          0.463  0.154  0.073  20.11
    osgdn-340m        0.463  0.182  0.073  19.70
    osgdn-apf-340m    0.458  0.203  0.080  20.21
    kda-340m          0.470  0.168  0.088  18.73
    oskda-340m        0.470  0.175  0.090  18.53
    oskda-apf-340m    0.473  0.185  0.098  19.00
""",
)

RETRIEVAL = _printed(
    "Retrieval LM-eval checks",
    "drop nq_open triviaqa retrieval",
    """
    delta_net-340m    0.029  0.016  0.003  0.016
    osdn-340m         0.027  0.018  0.004  0.016
    osdn-apf-340m     0.031  0.013  0.004  0.016
    gdn-340m          0.027  0.011  0.005  0.015
    osgdn-apf-340m    0.028  0.012  0.007  0.016
    kda-340m          0.024  0.024  0.005  0.018
    oskda-340m        0.024  0.012  0.005  0.014
    oskda-apf-340m    0.032  0.009  0.003  0.014
""",
)

BUCKETS = tuple(f"pg19_{2 * i}_{2 * i + 2}" for i in range(10))  # thousands of tokens
PG19 = _printed(
    "PG-19 perplexity by 2K-token bucket",
    f"{' '.join(BUCKETS)} pg19_ppl pg19_drift",
    """
    delta_net-340m    21.82  20.10  20.07  20.16  20.34  20.56  20.82  21.09  21.32  21.79  20.78  +1.69
    osdn-340m         21.13  19.57  19.52  19.54  19.64  19.78  19.97  20.17  20.34  20.76  20.02  +1.19
    osdn-apf-340m     20.78  19.10  19.05  19.11  19.29  19.54  19.86  20.23  20.59  21.23  19.85  +2.13
    gdn-340m          21.71  20.14  20.01  19.93  19.91  19.90  19.91  19.91  19.87  20.04  20.11  -0.10
    osgdn-340m        21.55  19.75  19.55  19.45  19.42  19.42  19.46  19.49  19.48  19.68  19.70  -0.07
    osgdn-apf-340m    21.93  20.27  20.11  20.02  19.99  19.98  19.98  19.99  19.95  20.13  20.21  -0.14
    kda-340m          20.29  18.70  18.59  18.53  18.52  18.52  18.54  18.56  18.54  18.71  18.73  +0.01
    oskda-340m        20.10  18.41  18.30  18.27  18.30  18.34  18.38  18.42  18.42  18.61  18.53  +0.20
    oskda-apf-340m    20.62  19.03  18.90  18.82  18.79  18.78  18.79  18.79  18.76  18.92  19.00  -0.11
""",
)

ABLATIONS = _printed(
    "Ablation over OSDN variants on the DeltaNet backbone",
    "commonsense recall longbench pg19_ppl pg19_drift",
    """
    delta_net-340m    0.457  0.150  0.072  20.78  +1.69
    osdn-340m         0.456  0.198  0.087  20.02  +1.19
    osdn-d0-340m      0.459  0.172  0.069  21.57  +5.34
    osdn-d0-free-340m 0.461  0.164  0.063  21.42  +4.25
    osdn-apf-340m     0.454  0.176  0.073  19.85  +2.13
""",
)

PERPLEXITY_1_3B = _printed(
    "1.3B / 100B perplexity summary",
    "fineweb_edu_ppl wikitext_ppl lambada_ppl lm_ppl nll_change",
    """
    delta_net-1.3b     8.71  17.23  11.84  14.28      –
    osdn-apf-1.3b      9.10  18.42  10.98  14.22 -0.004
""",
)

# These averages are over FDA and SWDE only: the paper leaves out SQuAD at this size.
RECALL_1_3B = _printed(
    "1.3B / 100B in-context recall, JRT-style cloze at 2K context",
    "fda swde recall_single fda_twice swde_twice recall_repeated recall",
    """
    delta_net-1.3b    0.215  0.371  0.293  0.061  0.392  0.227  0.260
    osdn-apf-1.3b     0.241  0.388  0.315  0.073  0.360  0.217  0.266
""",
)

COMMONSENSE_1_3B = _printed(
    "1.3B / 100B commonsense and short-context language understanding",
    "piqa hellaswag winogrande arc_easy arc_challenge social_iqa boolq lambada commonsense",
    """
    delta_net-1.3b    0.727  0.581  0.598  0.687  0.418  0.415  0.579  0.473  0.560
    osdn-apf-1.3b     0.733  0.592  0.606  0.690  0.404  0.417  0.605  0.480  0.566
""",
)

LONGBENCH_1_3B = _printed(
    "1.3B / 100B LongBench English 14-task average",
    "longbench",
    """
    delta_net-1.3b    0.115
    osdn-apf-1.3b     0.116
""",
)

RESIDUALS = _printed(
    "Direct mechanism diagnostic on repeated-recall prompts, both scales",
    "q_geo q_arith q_fda_twice q_swde_twice q_squad_twice",
    """
    delta_net-340m    0.537  0.636  0.555  0.490  0.592
    osdn-340m         0.433  0.566  0.453  0.385  0.487
    osdn-apf-340m     0.425  0.573  0.452  0.378  0.459
    delta_net-1.3b    0.432  0.546  0.455  0.387  0.473
    osdn-apf-1.3b     0.265  0.484  0.375  0.309  0.102
""",
)

# On an H100 in bfloat16; the change is in percent of the baseline's tokens per second.
THROUGHPUT = _printed(
    "Inference throughput, matched 340M scale and 1.3B / 100B scaling pair",
    "tokens_per_second decode_ms throughput_change",
    """
    delta_net-340m    784.5  2735.5     –
    osdn-340m         782.7  2740.5  -0.2
    osdn-apf-340m     767.2  2796.2  -2.2
    gdn-340m          882.9  2429.7     –
    osgdn-340m        865.1  2469.7  -2.0
    osgdn-apf-340m    865.4  2466.6  -2.0
    kda-340m          761.1  2817.6     –
    oskda-340m        803.0  2665.9  +5.5
    oskda-apf-340m    771.9  2774.0  +1.4
    delta_net-1.3b    794.0  2702.4     –
    osdn-apf-1.3b     739.9  2899.2  -6.8
""",
)
