// Checks dashboards against the types of Grafana's SDK. Prints what each file lacks, and fields that Grafana does not know.
//
//	grafana-schema FILE.json…
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func check(name string) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	var read dashboard.Dashboard
	err = read.UnmarshalJSONStrict(text)
	var found cog.BuildErrors
	// Without a fault, it returns a list of no faults.
	if listed := errors.As(err, &found); err != nil && (!listed || len(found) > 0) {
		return err
	}
	return read.Validate()
}

func main() {
	// The options of panels and the targets of data sources have types of their own.
	plugins.RegisterDefaultPlugins()
	status := 0
	for _, name := range os.Args[1:] {
		if err := check(name); err != nil {
			fmt.Printf("%s: %v\n", name, err)
			status = 1
		}
	}
	os.Exit(status)
}
