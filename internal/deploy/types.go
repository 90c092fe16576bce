// Package deploy carries one deployment from the instruction until the
// application serves, and records when each stage was reached.
package deploy

import "dewpoint/internal/deployment"

// What a deployment is asked, shows and leaves behind; see package deployment.
type (
	Request       = deployment.Request
	Record        = deployment.Record
	Watch         = deployment.Watch
	LayerProgress = deployment.LayerProgress
)
