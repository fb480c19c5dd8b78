package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	inferencev1 "penstock.io/protos/inference/v1"
)

// generateRequest returns a request to continue the text.
func (o options) generateRequest(text string) *inferencev1.GenerateRequest {
	return &inferencev1.GenerateRequest{
		Model:          o.model,
		Prompt:         &inferencev1.GenerateRequest_Text{Text: text},
		SamplingParams: o.params,
	}
}

// generate prints the continuation of the prompt as it arrives.
func generate(ctx context.Context, c client) error {
	defer fmt.Println()
	ctx, cancel := withDeadline(ctx, c.timeout)
	defer cancel()
	stream, err := c.Generate(ctx, c.generateRequest(c.texts[0]))
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(response.GetText())
	}
}
