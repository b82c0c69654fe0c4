"""How the page looks; Gradio sets its colours, marked `--`, for light and dark."""

from __future__ import annotations

FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
CSS = """
.gradio-container { --block-info-text-color: color-mix(in srgb, var(--body-text-color) 80%, transparent); }
.message { padding: .55em .9em; border-radius: 8px; background: var(--block-background-fill); }
.message[role=alert] { background: #fde8e8; color: #8a1c1c; border-left: 4px solid #c53030; }
.dark .message[role=alert] { background: #46191b; color: #ffd3d0; }
#figures:has(.prose:empty), #difference:has(.prose:empty), #picture:has(.prose:empty) { display: none; }
.note { opacity: .8; margin: .3em 0 .6em; }
.big { font-size: 1.6rem; margin: .2em 0 0; }
.big b { font-size: 2.6rem; color: var(--body-text-color); }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .4em .9em; align-items: center;
  margin: .8em 0; font-variant-numeric: tabular-nums; }
.bars .bar { display: block; height: 10px; border-radius: 4px; min-width: 2px; }
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
.overview { display: grid; grid-template-columns: max-content 1fr; gap: 3px .6em; align-items: center; }
.overview .layer { font-size: .8em; opacity: .8; text-align: right; font-variant-numeric: tabular-nums; }
.overview .row { display: flex; gap: 3px; }
.overview button { flex: 1; min-width: 2px; height: 16px; padding: 0; border: 0; border-radius: 2px; cursor: pointer; }
.overview button[aria-pressed=true], .overview button:focus-visible { outline: 2px solid var(--body-text-color);
  outline-offset: 1px; }
pre.levels { background: var(--background-fill-primary) !important; color: var(--body-text-color) !important;
  border-color: var(--border-color-primary) !important; }
.examples { gap: .4em !important; flex-wrap: wrap; }
.examples button { flex: 0 1 auto; min-width: 0; }
.plain textarea { font-family: var(--font-mono); }
@media (max-width: 500px) {
  .bars { grid-template-columns: 1fr; gap: .15em; }
  .bars span:nth-child(3n) { margin-bottom: .5em; }
  .figures th, .figures td { padding-right: .5em; font-size: .9em; }
}
"""
