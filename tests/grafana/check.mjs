// Are the dashboards what this release of Grafana understands? Each file becomes the value of a constant of Grafana's own types.
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import ts from "typescript";

const here = import.meta.dirname;
const dashboards = process.argv[2] ?? join(here, "..", "..", "deploy", "grafana", "dashboards");
const build = join(here, "build");
rmSync(build, { recursive: true, force: true });
mkdirSync(build);
const files = readdirSync(dashboards).filter((name) => name.endsWith(".json")).sort();
const sources = files.map((name) => {
  const source = join(build, name.replace(/json$/, "ts"));
  // All on the file's first line, so that errors have the lines of the JSON file.
  writeFileSync(source, `import type { Checked } from "../types.ts"; export const dashboard: Checked = ${readFileSync(join(dashboards, name), "utf8")}`);
  return source;
});
const program = ts.createProgram(sources, {
  strict: true,
  noEmit: true,
  skipLibCheck: true,
  allowImportingTsExtensions: true,
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
  types: [],
});
const wrong = ts.getPreEmitDiagnostics(program);
for (const each of wrong) {
  const place = each.file ? ts.getLineAndCharacterOfPosition(each.file, each.start) : undefined;
  const name = each.file?.fileName.startsWith(build) ? join(dashboards, files[sources.indexOf(each.file.fileName)]) : each.file?.fileName;
  console.error(`${name ?? "?"}:${(place?.line ?? 0) + 1}: ${ts.flattenDiagnosticMessageText(each.messageText, "\n  ")}`);
}
if (files.length === 0) console.error(`There are no dashboards in ${dashboards}. Nothing was checked.`);
else if (wrong.length === 0) console.log(`${files.join(", ")}: as Grafana's types of @grafana/schema ${JSON.parse(readFileSync(join(here, "node_modules", "@grafana", "schema", "package.json"), "utf8")).version} want it`);
process.exit(wrong.length > 0 || files.length === 0 ? 1 : 0);
