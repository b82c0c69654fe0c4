"""Style sheet and fonts of the page. Gradio sets its colours, marked `--`, for light and dark."""

from __future__ import annotations

FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
CSS = """
.gradio-container { --block-info-text-color: color-mix(in srgb, var(--body-text-color) 80%, transparent); }
.message { padding: .55em .9em; border-radius: 8px; background: var(--block-background-fill); }
.message[role=alert] { background: #fde8e8; color: #8a1c1c; border-left: 4px solid #c53030; }
.dark .message[role=alert] { background: #46191b; color: #ffd3d0; }
#figures:has(.prose:empty), #difference:has(.prose:empty), #picture:has(.prose:empty),
#memory:has(.prose:empty) { display: none; }
.note { opacity: .8; margin: .3em 0 .6em; }
.big { font-size: 1.6rem; margin: .2em 0 0; }
.big b { font-size: 2.6rem; color: var(--body-text-color); }
.message .bar { height: 6px; margin-top: .5em; border-radius: 3px; background: var(--border-color-primary); }
.message .bar i { display: block; height: 100%; border-radius: 3px; background: #0072b2; }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.1em; font-variant-numeric: tabular-nums; margin: .5em 0; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .4em;
  outline: 1px solid var(--border-color-primary); }
.chart { display: grid; grid-template-columns: 3em 1fr; height: 150px; margin-top: .9em; }
.chart svg { width: 100%; height: 100%; overflow: visible; color: var(--body-text-color); }
.chart line { stroke: var(--border-color-primary); vector-effect: non-scaling-stroke; }
.chart polyline { fill: none; stroke-width: 2.5; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.chart line.budget { stroke: #d55e00; stroke-width: 1.5; stroke-dasharray: 6 4; }
.rungs { display: grid; grid-auto-flow: column; grid-auto-columns: 1fr; gap: 2px; height: 4.5em; align-items: end; }
.rungs i { min-width: 1px; height: 100%; border-radius: 2px; outline: 1px solid #aeb6c2; }
.scale { position: relative; }
.scale span { position: absolute; right: .6em; transform: translateY(-50%); font-size: .8em; }
.below { display: flex; justify-content: space-between; font-size: .8em; margin-top: .3em; }
#memory .below { margin-left: 3.75em; }
.figures, .figures tr { border: 0 !important; }
.figures { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.figures td { white-space: nowrap; }
.figures th:last-child, .figures td:last-child { padding-right: 0 !important; }
.figures th, .figures td { text-align: left; padding: .35em .8em .35em 0; border: 0 !important;
  border-bottom: 1px solid var(--border-color-primary) !important; }
.difference { font-family: var(--font-mono); white-space: pre-wrap; overflow-wrap: anywhere; }
.difference del { background: #fde8e8; color: #8a1c1c; }
.difference ins { background: #dcecf9; color: #14456b; text-decoration: none; }
.dark .difference del { background: #46191b; color: #ffd3d0; }
.dark .difference ins { background: #123a5c; color: #d3e8fb; }
.dark .heads { background: #aeb6c2; padding: 3px; border-radius: 5px; }
.heads { display: grid; grid-auto-flow: column; grid-auto-columns: 1fr; gap: 2px; }
.heads i, .heads button { min-width: 1px; padding: 0; border: 0; border-radius: 2px; outline: 1px solid #aeb6c2; }
.heads button { cursor: pointer; }
.heads button[aria-pressed=true], .heads button:focus-visible { outline: 2px solid #d0021b; z-index: 1; }
.precision { display: grid; grid-template-columns: max-content 1fr max-content; gap: .4em .8em; align-items: center; }
.bits { display: flex; gap: 2px; }
.bits i { flex: 1; height: 22px; border-radius: 3px; border: 1px solid var(--border-color-primary); }
.bits .kept { background: var(--kept); }
#picture pre { max-height: 20em; overflow-y: auto; }
pre.levels { background: var(--background-fill-primary) !important; color: var(--body-text-color) !important;
  border-color: var(--border-color-primary) !important; }
.examples { gap: .4em !important; flex-wrap: wrap; }
.examples button { flex: 0 1 auto; min-width: 0; }
.plain textarea { font-family: var(--font-mono); }
@media (max-width: 500px) {
  .gradio-container { --layout-gap: 10px; --block-label-margin: 0; }
  .gradio-container h1 { font-size: 1.4em; }
  .chart { height: 130px; }
  .examples { flex-wrap: nowrap !important; overflow-x: auto; }
  .examples button { flex: 0 0 auto; }
  .figures th, .figures td { padding-right: .5em; font-size: .9em; }
}
"""
