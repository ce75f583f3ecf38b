"""The style sheet and the script of a schedule's page."""

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1f24; --soft: #626a76; --line: #dfe3e8; --card: #f5f7f9;
  --alarm: #c4161c; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --text: #e4e7eb; --soft: #99a2ae; --line: #30363d;
  --card: #1e2329; --alarm: #ff7b72; } }
body { margin: 0 auto; max-width: 1240px; padding: 24px 20px 60px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 4px 0 10px; max-width: 90ch; } .apart { margin-top: 22px; } .soft, small { color: var(--soft); }
.numbers { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.numbers div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 8px 14px; }
.numbers b { display: block; font-size: 21px; font-weight: 600; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 720px; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid, .tick { stroke: var(--line); } .track { fill: var(--card); }
.limit, .peak { stroke: var(--alarm); stroke-dasharray: 6 4; } line.peak { stroke: var(--text); }
circle.peak { fill: var(--text); stroke: var(--back); stroke-dasharray: none; }
svg text.limit { fill: var(--alarm); stroke: none; } svg text.peak { fill: var(--text); stroke: none; }
.rank { stroke: #4e79a7; } svg text.name { fill: var(--text); }
.cursor { stroke: var(--text); } .slice:hover { opacity: .65; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 0; margin: 6px 0; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
#here { min-height: 3em; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th { text-align: left; font-weight: 600; background: var(--card); } th, td { padding: 3px 9px; vertical-align: top; }
td { border-top: 1px solid var(--line); } .number { text-align: right; white-space: nowrap; }
.code { font: 12px/1.6 ui-monospace, monospace; overflow-wrap: anywhere; min-width: 32ch; }
#decided td:first-child, .kind { white-space: nowrap; } #decided td { overflow-wrap: anywhere; min-width: 14ch; }
#schedule { max-height: 80vh; overflow: auto; border: 1px solid var(--line); border-radius: 6px; }
#schedule th { position: sticky; top: 0; } #schedule td { white-space: nowrap; }
#schedule .folded td { font-weight: 600; } #schedule .inner td:nth-child(2) { padding-left: 26px; }
#layers { display: grid; grid-template-columns: minmax(6ch, max-content) 1fr max-content; gap: 3px 10px;
  font-size: 13px; align-items: center; }
#layers .bar { display: flex; height: 15px; } #layers .bar i { display: block; height: 100%; }
#layers span { overflow-wrap: anywhere; max-width: 30ch; }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 12px;
  font: 12px/1.45 ui-monospace, monospace; }
#words { display: grid; grid-template-columns: max-content 1fr; gap: 0 14px; margin: 6px 0 10px; font-size: 14px;
  max-width: 90ch; }
#words dt { font: 12px/21px ui-monospace, monospace; } #words dd { margin: 0; color: var(--soft); }
@media (max-width: 900px) { svg text { font-size: 15px; } }
@media (max-width: 600px) { body { padding: 14px 10px 40px; } svg text { font-size: 17px; }
  #layers span { max-width: 18ch; } .numbers div { padding: 6px 10px; } .numbers b { font-size: 17px; }
  th, td { padding: 3px 5px; } #words { display: block; } }
@media print { :root { --back: #fff; --text: #000; --soft: #444; --line: #ccc; --card: #fff; --alarm: #c4161c; }
  body { padding: 0; font-size: 11px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  #here { display: none; } svg, .numbers, .legend { break-inside: avoid; } h2 { break-after: avoid; }
  p, #words { max-width: none; } #words, #words dt { font-size: 10px; line-height: 1.4; }
  pre { overflow: visible; border: 0; padding: 0; font-size: 6.6px; }
  #schedule { max-height: none; overflow: visible; border: 0; } table { font-size: 7px; } }
"""

# Says under the memory picture what is held at the time under the pointer.
SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const svg = document.getElementById("memory"), cursor = svg.querySelector(".cursor");
const here = document.getElementById("here");
const idle = here.textContent = "Move the pointer over the picture to read the bytes at a time.";
const size = mib => mib >= 1024 ? (mib / 1024).toFixed(1) + " GiB" : mib + " MiB";
svg.addEventListener("pointermove", event => {
  const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
  if (x < data.left || x > data.right || !data.points.length) return;
  let low = 0, high = data.points.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1;
    if (data.points[middle][0] <= x) low = middle; else high = middle - 1; }
  const sizes = data.points[low].slice(1), ms = data.ms * (x - data.left) / (data.right - data.left);
  cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
  here.textContent = "at " + ms.toFixed(2) + " ms: " + size(sizes.reduce((a, b) => a + b, 0)) + " in all, "
    + data.names.map((name, i) => [name, sizes[i]]).filter(entry => entry[1]).reverse()
      .map(entry => entry[0] + " " + size(entry[1])).join(", ");
});
svg.addEventListener("pointerleave", () => {
  cursor.setAttribute("visibility", "hidden"); here.textContent = idle; });
"""
