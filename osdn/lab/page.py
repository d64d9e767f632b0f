"""The frame of the demo's page: light, narrow enough for a phone, and nothing to fetch."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Online Scaled DeltaNet: a demonstration</title>
<link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 62rem; padding: 1.2rem 1rem 3rem; color: #20242c; background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: .4rem 0 .3rem; }}
h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-top: .8rem; border-top: 1px solid #e3e6ec; }}
h3 {{ font-size: .95rem; margin: 1rem 0 .3rem; }}
p {{ margin: .5rem 0; max-width: 46rem; }}
a {{ color: #2a6fbb; }}
.lead {{ color: #4c566a; font-size: 1.05rem; }}
.note, figcaption, footer {{ color: #5a6372; font-size: .86rem; line-height: 1.45; }}
.figures {{ display: grid; gap: 1.4rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }}
figure {{ margin: 0; min-width: 0; }}
svg {{ display: block; height: auto; max-width: 34rem; }}
svg text {{ font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; margin: .6rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .8rem .3rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #eceef2; }}
th:first-child {{ text-align: left; position: sticky; left: 0; background: #fff; }}
thead th {{ color: #5a6372; font-weight: 600; }}
small {{ color: #6b7482; }}
pre {{ background: #f6f7f9; padding: .7rem .9rem; border-radius: 4px; overflow-x: auto; font-size: .8rem;
  line-height: 1.4; margin: 0; }}
footer {{ margin-top: 2.5rem; border-top: 1px solid #e3e6ec; padding-top: .8rem; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>Online Scaled DeltaNet, trained in minutes</h1>
<p class="lead">What an online scale on the written keys does to a small delta-rule model, with seeds and
intervals.</p>
{body}
<footer>{foot}</footer>
</body>
</html>
"""
