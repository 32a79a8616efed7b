"""A page as one file, and its style sheet: light and dark, screen and paper."""

from collections.abc import Iterable
from html import escape

STYLE = """
:root{--paper:#fbfaf7;--card:#fff;--ink:#1d2329;--soft:#5c6670;--line:#e2e0d9;
--personal:#00796b;--fedavg:#c77700;--ft:#7a4fb0;--alone:#77808a;
--params:#3566b0;--bundle:#7a4fb0;--latency:#00796b;--upload:#c77700;--download:#b0455e}
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--card:#1c2227;--ink:#e8eaec;--soft:#a0a9b2;--line:#313940;
--personal:#3ecfb8;--fedavg:#f0a93c;--ft:#b895ea;--alone:#98a2ac;
--params:#7aa7ee;--bundle:#b895ea;--latency:#3ecfb8;--upload:#f0a93c;--download:#ee8fa3}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:960px;margin:0 auto;padding:48px 24px 64px}
h1{font-size:2.1rem;line-height:1.15;letter-spacing:-.02em;margin:0 0 .4rem}
h2{font-size:1.2rem;letter-spacing:-.01em;margin:0 0 .35rem}
p{margin:0 0 .9rem;max-width:68ch}
.lead{font-size:1.08rem;color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:22px 24px 18px;margin:20px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(112px,1fr));gap:12px;margin:28px 0 8px}
.tiles div{display:flex;flex-direction:column;background:var(--card);border:1px solid var(--line);
border-radius:12px;padding:14px 14px}
.tiles dd{margin:0;font-size:1.65rem;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.tiles dt{color:var(--soft);font-size:.82rem;line-height:1.3}
figure{margin:8px 0 0}
.chart{display:block;width:100%;height:auto;overflow:visible}
.chart text{font-size:12.5px;fill:var(--ink)}
.chart .tick{fill:var(--soft);font-size:11.5px}
.chart .value{font-size:12px;paint-order:stroke;stroke:var(--card);stroke-width:4px;
stroke-linejoin:round;font-variant-numeric:tabular-nums}
.grid{stroke:var(--line);stroke-width:1}
.span{stroke:var(--line);stroke-width:4;stroke-linecap:round}
.chart .cell+.value{stroke:none}.chart .sum{font-weight:650}
.rule{stroke:var(--soft);stroke-width:1}
.reference{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:3 3}
.mark{fill:var(--personal);stroke:var(--card);stroke-width:1.25}
.line{fill:none;stroke:var(--personal);stroke-width:2.5;stroke-linejoin:round}
.mark.local,.mark.scratch{fill:var(--alone)}.line.local,.line.scratch{stroke:var(--alone)}
.mark.fedavg,.mark.zero_shot{fill:var(--fedavg)}.line.fedavg,.line.zero_shot{stroke:var(--fedavg)}
.mark.fedavg_ft{fill:var(--ft)}.line.fedavg_ft{stroke:var(--ft)}
.bar,.swatch{fill:var(--params);background:var(--params)}
.bundle_ratio{fill:var(--bundle);background:var(--bundle)}
.latency_ratio{fill:var(--latency);background:var(--latency)}
.upload_ratio{fill:var(--upload);background:var(--upload)}
.download_ratio{fill:var(--download);background:var(--download)}
.cell{fill:var(--personal)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;margin:0 0 4px;padding:0;font-size:.88rem}
.legend li{display:flex;align-items:center;gap:7px}
.swatch{width:12px;height:12px;border-radius:3px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.8rem}
th,td{padding:5px 9px 5px 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th:last-child,td:last-child{padding-right:0}
thead th{white-space:normal;vertical-align:bottom;color:var(--soft);font-weight:550;line-height:1.25}
thead th:nth-child(n+3),td.n{text-align:right;font-variant-numeric:tabular-nums}
tbody th{font-weight:550}
h3{font-size:.95rem;margin:18px 0 4px}
.facts{display:flex;flex-wrap:wrap;gap:6px 22px;margin:28px 4px 0;font-size:.82rem;color:var(--soft)}
.facts div{display:flex;gap:6px}.facts dd{margin:0;color:var(--ink);font-variant-numeric:tabular-nums}
@media (max-width:560px){main{padding:28px 14px}section{padding:16px 14px}}
@media print{body{background:#fff}section,.tiles div{break-inside:avoid}main{max-width:none;padding:0}}
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The page of this title whose body is ``parts``."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
