// What our dashboards may hold: Grafana's own types, with those of the plugins that they use, as they look in JSON.
import type { AnnotationQuery, Dashboard, FieldConfig, FieldConfigSource, Panel, RowPanel } from "@grafana/schema";
import type * as bargauge from "@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen.d.ts";
import type * as stat from "@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.d.ts";
import type * as statetimeline from "@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.d.ts";
import type * as table from "@grafana/schema/dist/types/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen.d.ts";
import type * as timeseries from "@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.d.ts";

/** Enums are their values in JSON. */
type Json<T> = unknown extends T
  ? T
  : T extends string
    ? `${T}`
    : T extends number | boolean | null | undefined
      ? T
      : T extends readonly (infer Item)[]
        ? Json<Item>[]
        : { [Key in keyof T]: Json<T[Key]> };

/** As provisioned. */
type Source = { type: "prometheus"; uid: "prometheus" };

/** Of the Prometheus data source, whose types @grafana/schema lacks. */
type Query = {
  refId: string;
  expr: string;
  legendFormat: string;
  range: boolean;
  instant?: boolean;
  format?: "time_series" | "table";
};
type Annotation = Omit<AnnotationQuery, "datasource" | "target"> & {
  datasource: Source;
  target: { refId: string; expr: string; interval: string };
  titleFormat: string;
  textFormat: string;
  tagKeys: string;
};

type Of<Kind extends string, Options, Custom> = Omit<
  Panel,
  "type" | "title" | "description" | "datasource" | "targets" | "options" | "fieldConfig"
> & {
  type: Kind;
  title: string;
  description: string;
  datasource: Source;
  targets: Query[];
  options: Options;
  fieldConfig: { defaults: Omit<FieldConfig, "custom"> & { custom?: Custom }; overrides: FieldConfigSource["overrides"] };
};
type Known =
  | Of<"bargauge", bargauge.Options, never>
  | Of<"stat", stat.Options, never>
  | Of<"state-timeline", Omit<statetimeline.Options, "timezone">, statetimeline.FieldConfig>
  | Of<"table", table.Options, table.FieldConfig>
  | Of<"timeseries", Omit<timeseries.Options, "timezone">, timeseries.FieldConfig>
  | RowPanel;

export type Checked = Json<Omit<Dashboard, "annotations" | "panels"> & { annotations: { list: Annotation[] }; panels: Known[] }>;
