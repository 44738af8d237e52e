{{- define "freshet.image" -}}
{{ required "image.repository: where you pushed the image of deploy/Dockerfile" .Values.image.repository }}:{{ required "image.tag: the tag of that image" .Values.image.tag }}
{{- end }}

{{- define "freshet.container" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}
